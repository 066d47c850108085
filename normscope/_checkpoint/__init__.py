"""Checkpoints: what is in files of weights, what differs between two of them, one tensor at a time and without the model."""
