"""Optimizers that know which weights are scale-free, and ways to keep a model's capacity in check."""

from normscope.optim.capacity import LogCapacity, SpectralCap, spectral_cap
from normscope.optim.projected import SGDP, AdamP
from normscope.optim.spherical import SGDG, AdamG

__all__ = ["SGDG", "SGDP", "AdamG", "AdamP", "LogCapacity", "SpectralCap", "spectral_cap"]
