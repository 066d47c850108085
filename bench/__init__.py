"""Comparisons with peers, each measured in one run. `python -m bench` lists them, `python -m bench NAME` runs one."""
