"""Second derivatives of a loss: Hessian spectra with the symmetries divided out, and the shape of the loss around a point."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
