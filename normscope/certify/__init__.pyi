from .ablation import normalizer_ablation
from .operator_norm import operator_norm
from .robustness import certify_radius, local_brackets
from .weights import weight_sensitivities

__all__ = ["certify_radius", "local_brackets", "normalizer_ablation", "operator_norm", "weight_sensitivities"]
