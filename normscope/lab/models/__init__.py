"""Networks of the experiments: functions that return a module, the same weights each time unless a generator is given."""

from normscope.lab.models.catalogue import NETWORKS, build
from normscope.lab.models.efficientnet import efficientnet_b3
from normscope.lab.models.mlp import mlp
from normscope.lab.models.normalizers import NORMALIZERS, normalizer, token_normalizer
from normscope.lab.models.resnet18 import resnet18
from normscope.lab.models.transformer import gpt, vit
from normscope.lab.models.vgg import vgg

__all__ = [
    "NETWORKS", "NORMALIZERS", "build", "efficientnet_b3", "gpt", "mlp", "normalizer", "resnet18", "token_normalizer", "vgg", "vit",
]  # fmt: skip
