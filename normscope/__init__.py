"""See what normalization does to your network."""

from normscope import optim, rules
from normscope.auditing import Audit, audit
from normscope.certify.ablation import normalizer_ablation
from normscope.certify.lipschitz import lipschitz
from normscope.certify.operator_norm import operator_norm
from normscope.certify.robustness import certify_radius, local_brackets
from normscope.certify.weights import weight_sensitivities
from normscope.checkup.doctor import doctor
from normscope.claims.ledger import run_claims
from normscope.core.bracket import Bracket
from normscope.core.errors import ExportError, InputError, NormscopeError, Refusal
from normscope.core.magnitude import Magnitude
from normscope.core.region import Ball, Box
from normscope.curvature.landscape import Landscape, landscape
from normscope.curvature.spectrum import Curvature, hessian
from normscope.guarantees.bound import Bound
from normscope.guarantees.comparison import Trained, compare_bounds
from normscope.guarantees.flatness import flatness
from normscope.guarantees.generalization import Guarantees, generalization
from normscope.guarantees.iterations import TrainingCost, training_cost
from normscope.guarantees.margins import margins
from normscope.lab.runner import load_experiment, run_experiment
from normscope.recorder.probes import Probe
from normscope.recorder.reading import Run, load_run
from normscope.recorder.watch import Watch, watch
from normscope.symmetry.detect import symmetries
from normscope.symmetry.report import SymmetryReport
from normscope.version import __version__

__all__ = [
    "Audit", "Ball", "Bound", "Box", "Bracket", "Curvature", "ExportError", "Guarantees", "InputError", "Landscape",
    "Magnitude", "NormscopeError", "Probe", "Refusal", "Run", "SymmetryReport", "Trained", "TrainingCost", "Watch",
    "__version__", "audit", "certify_radius", "compare_bounds", "doctor", "flatness", "generalization", "hessian", "landscape",
    "lipschitz", "load_experiment", "load_run", "local_brackets", "margins", "normalizer_ablation", "operator_norm", "optim",
    "rules", "run_claims", "run_experiment", "symmetries", "training_cost", "watch", "weight_sensitivities",
]  # fmt: skip
