"""Capacity."""
SpectralCap = log_capacity = spectral_cap = None
