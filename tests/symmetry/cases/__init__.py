"""Small models and all of their symmetries, as theory has them."""

from tests.symmetry.cases.activations import ACTIVATIONS
from tests.symmetry.cases.batch_norm import BATCH_NORM
from tests.symmetry.cases.branches import BRANCHES
from tests.symmetry.cases.case import Case, described
from tests.symmetry.cases.sample_norms import SAMPLE_NORMS
from tests.symmetry.cases.weight_norms import WEIGHT_NORMS

CASES: dict[str, Case] = BATCH_NORM | SAMPLE_NORMS | WEIGHT_NORMS | ACTIVATIONS | BRANCHES

__all__ = ["CASES", "Case", "described"]
