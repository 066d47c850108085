from .landscape import Landscape, landscape
from .spectrum import Curvature, hessian

__all__ = ["Curvature", "Landscape", "hessian", "landscape"]
