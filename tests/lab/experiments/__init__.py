"""Experiments: they run, they measure what they say, and their verdicts follow from the numbers."""
