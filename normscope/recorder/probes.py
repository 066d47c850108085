"""placeholder"""


class Probe:
    every = 1
    cost = 0.0
