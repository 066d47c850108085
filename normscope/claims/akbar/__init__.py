"""Akbar: symmetries, derivatives, dynamics, curvature, experiments."""

from normscope.claims.akbar import derivatives, dynamics, experiments, observations, symmetry

__all__ = ["derivatives", "dynamics", "experiments", "observations", "symmetry"]
