"""Than 2025: normalizers, networks, optimization, generalization, figures."""
