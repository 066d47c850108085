"""Data sets by name."""

from __future__ import annotations

from pathlib import Path

from normscope.core.errors import InputError
from normscope.lab.datasets import cifar10, digits, fashion_mnist, synthetic
from normscope.lab.datasets.source import Source
from normscope.lab.datasets.split import Split

DATASETS = {
    "digits": Source(digits.digits),
    "gaussians": Source(synthetic.gaussians),
    "rings": Source(synthetic.rings),
    "markov": Source(synthetic.markov),
    "halfplanes": Source(synthetic.halfplanes),
    "products": Source(synthetic.products),
    "waves": Source(synthetic.waves),
    "sigmoids": Source(synthetic.sigmoids),
    "cifar10": cifar10.SOURCE,
    "fashion-mnist": fashion_mnist.SOURCE,
}


def load_data(name: str, directory: Path | None = None) -> Split:
    """The data set `name`; directory: of its files, where it has files.

    >>> load_data("digits").sample_shape
    (1, 8, 8)
    """
    if name not in DATASETS:
        raise InputError(f"no data set {name!r}: choose from {', '.join(DATASETS)}")
    return DATASETS[name].split(name, directory)
