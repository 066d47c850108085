"""Models, data and experiments."""
