"""The groups of parameter changes that leave a model's outputs as they are, found in its graph and tried on numbers."""
