from .bound import Bound
from .comparison import Trained, compare
from .flatness import flatness
from .generalization import Guarantees, generalization
from .iterations import TrainingCost, training_cost
from .margins import margins

__all__ = ["Bound", "Guarantees", "Trained", "TrainingCost", "compare", "flatness", "generalization", "margins", "training_cost"]
