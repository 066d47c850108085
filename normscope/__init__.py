"""See what normalization does to your network.

The public names stand in `__init__.pyi`, which type checkers read; each is imported when it is first used.
"""

import warnings
from typing import Any

import lazy_loader

from normscope.version import __version__ as __version__

# names of earlier releases, and the namespace in which they are now; `compare_bounds` became `compare`
MOVED = {
    "Bound": "bounds.Bound",
    "Curvature": "curvature.Curvature",
    "Guarantees": "bounds.Guarantees",
    "Landscape": "curvature.Landscape",
    "Trained": "bounds.Trained",
    "TrainingCost": "bounds.TrainingCost",
    "certify_radius": "certify.certify_radius",
    "compare_bounds": "bounds.compare",
    "flatness": "bounds.flatness",
    "landscape": "curvature.landscape",
    "load_experiment": "lab.load_experiment",
    "local_brackets": "certify.local_brackets",
    "margins": "bounds.margins",
    "normalizer_ablation": "certify.normalizer_ablation",
    "operator_norm": "certify.operator_norm",
    "run_claims": "claims.run_claims",
    "run_experiment": "lab.run_experiment",
    "training_cost": "bounds.training_cost",
    "weight_sensitivities": "certify.weight_sensitivities",
}

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in MOVED:
        return _public(name)
    namespace, _, attribute = MOVED[name].partition(".")
    warnings.warn(f"ns.{name} is now ns.{MOVED[name]}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
    return getattr(_public(namespace), attribute)
