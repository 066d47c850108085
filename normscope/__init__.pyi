"""The public names of normscope. This file is what `normscope/__init__.py` imports from, name by name, when one is used."""

from . import bounds, certify, claims, curvature, geometry, lab, optim, rules
from ._checkpoint.auditing import checkpoint
from ._checkpoint.comparing import diff
from ._checkpoint.difference import Difference
from ._checkpoint.folding import fold
from ._checkpoint.report import CheckpointReport
from ._doctor.doctor import doctor
from ._doctor.recalibration import recalibrate
from ._watch.probes import Probe
from ._watch.reading import Run, load_run
from ._watch.recording import Watch
from ._watch.watch import watch
from .auditing import Audit, audit
from .bounds.generalization import generalization
from .certify.lipschitz import lipschitz
from .core.bracket import Bracket
from .core.errors import ExportError, InputError, NormscopeError, Refusal
from .core.magnitude import Magnitude
from .core.region import Ball, Box
from .curvature.spectrum import hessian
from .symmetry.detect import symmetries
from .symmetry.report import SymmetryReport
from .version import __version__

__all__ = [
    "Audit",
    "Ball",
    "Box",
    "Bracket",
    "CheckpointReport",
    "Difference",
    "ExportError",
    "InputError",
    "Magnitude",
    "NormscopeError",
    "Probe",
    "Refusal",
    "Run",
    "SymmetryReport",
    "Watch",
    "__version__",
    "audit",
    "bounds",
    "certify",
    "checkpoint",
    "claims",
    "curvature",
    "diff",
    "doctor",
    "fold",
    "generalization",
    "geometry",
    "hessian",
    "lab",
    "lipschitz",
    "load_run",
    "optim",
    "recalibrate",
    "rules",
    "symmetries",
    "watch",
]  # fmt: skip
