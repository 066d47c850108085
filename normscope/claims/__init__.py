"""The statements of two papers about normalization, each as a function that tries to confirm and to refute it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
