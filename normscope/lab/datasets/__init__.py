"""Data sets of the experiments, by name; what is missing is said in one line with how to get it."""

from normscope.lab.datasets.catalogue import DATASETS, load_data
from normscope.lab.datasets.cifar10 import cifar10
from normscope.lab.datasets.digits import digits
from normscope.lab.datasets.fashion_mnist import fashion_mnist
from normscope.lab.datasets.split import Labelled, Split
from normscope.lab.datasets.synthetic import gaussians, markov, rings

__all__ = ["DATASETS", "Labelled", "Split", "cifar10", "digits", "fashion_mnist", "gaussians", "load_data", "markov", "rings"]
