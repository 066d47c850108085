"""See what normalization does to your network."""

from normscope import rules
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
from normscope.version import __version__

__all__ = [
    "Audit", "Ball", "Box", "Bracket", "ExportError", "InputError", "Magnitude", "NormscopeError", "Refusal", "__version__",
    "audit", "certify_radius", "doctor", "lipschitz", "local_brackets", "normalizer_ablation", "operator_norm", "rules",
    "run_claims", "weight_sensitivities",
]  # fmt: skip
