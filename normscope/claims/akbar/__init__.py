"""Akbar: symmetries, derivatives, dynamics, experiments, observations."""
