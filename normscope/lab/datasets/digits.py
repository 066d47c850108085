"""Handwritten digits that come with scikit-learn, as a data set of the lab."""

from __future__ import annotations

import torch

from normscope.digits import digits as parts
from normscope.lab.datasets.split import Split


def digits(generator: torch.Generator | None = None) -> Split:
    """`normscope.digits.digits` as a split."""
    return Split(*parts(generator))
