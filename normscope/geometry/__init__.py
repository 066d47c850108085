"""Spheres, quotients by symmetries, gradient flow, and how fast scale-free weights turn."""

from normscope.geometry.dynamics import Rotation, UpdateRule, effective_learning_rate
from normscope.geometry.flow import Path, gradient_descent, gradient_flow
from normscope.geometry.quotient import canonical, horizontal
from normscope.geometry.sphere import Spheres

__all__ = [
    "Path", "Rotation", "Spheres", "UpdateRule", "canonical", "effective_learning_rate", "gradient_descent", "gradient_flow",
    "horizontal",
]  # fmt: skip
