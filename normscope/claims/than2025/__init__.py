"""Than 2025: normalizers' constants, networks, generalization, figures."""

from normscope.claims.than2025 import figures, generalization, networks, normalizers, optimization

__all__ = ["figures", "generalization", "networks", "normalizers", "optimization"]
