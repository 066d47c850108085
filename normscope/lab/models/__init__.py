"""Networks of the experiments: functions that return a module, the same weights each time unless a generator is given."""

from normscope.lab.models.catalog import NETWORKS, build
from normscope.lab.models.mlp import mlp
from normscope.lab.models.normalizers import NORMALIZERS, normalizer
from normscope.lab.models.resnet18 import resnet18

__all__ = ["NETWORKS", "NORMALIZERS", "build", "mlp", "normalizer", "resnet18"]
