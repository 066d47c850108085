"""Than 2025: normalizers, networks, weights, optimization, generalization, figures."""
