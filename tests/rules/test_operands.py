"""Operations of several tensors, any one or two of which are the input: the bound is true, infinite or refused."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope as ns
from normscope.core.errors import InternalError, UnforeseenError

D = torch.float64


def numbers(*shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=D)


FAR = numbers(1, 4, size=1e3)
IMAGE = numbers(1, 4, 5)
PLACES = torch.tensor([[0, 2, 1, 0]])
VECTOR = numbers(4)
SQUARE = numbers(4, 4)
POSITIVE = numbers(4).abs() + 1

# the operation, and its operands, each of which is given the input in turn
OPERATIONS = {
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (4,), g, b, eps=9.0), (FAR, VECTOR, VECTOR)),
    "rms_norm": (lambda x, g: F.rms_norm(x, (4,), g, eps=9.0), (FAR, VECTOR)),
    "group_norm": (lambda x, g, b: F.group_norm(x, 2, g, b, eps=9.0), (1e3 * IMAGE, VECTOR, VECTOR)),
    "instance_norm": (lambda x, g, b: F.instance_norm(x, None, None, g, b, eps=9.0), (1e3 * IMAGE, VECTOR, VECTOR)),
    "batch_norm": (lambda x, m, v, g, b: F.batch_norm(x, m, v, g, b, eps=9.0), (FAR, VECTOR, POSITIVE, VECTOR, VECTOR)),
    "prelu": (lambda x, a: F.prelu(x, a), (FAR, VECTOR)),
    "prelu of one entry": (F.prelu, (numbers(1), numbers(1))),
    "prelu of a number": (F.prelu, (numbers(1)[0], numbers(1)[0])),
    "linear": (F.linear, (FAR, SQUARE, VECTOR)),
    "bilinear": (F.bilinear, (FAR, FAR, numbers(3, 4, 4), numbers(3))),
    "conv1d": (F.conv1d, (IMAGE, numbers(4, 4, 2), VECTOR)),
    "conv_transpose1d": (F.conv_transpose1d, (IMAGE, numbers(4, 4, 2), VECTOR)),
    "embedding": (lambda w: F.embedding(PLACES, w), (SQUARE,)),
    "addmm": (torch.addmm, (SQUARE, SQUARE, SQUARE)),
    "baddbmm": (torch.baddbmm, (SQUARE[None], SQUARE[None], SQUARE[None])),
    "addcmul": (torch.addcmul, (FAR, FAR, FAR)),
    "addcdiv": (torch.addcdiv, (FAR, FAR, POSITIVE)),
    "lerp": (torch.lerp, (FAR, 2 * FAR, VECTOR)),
    "pow": (torch.pow, (POSITIVE, VECTOR)),
    "where": (lambda x, y: torch.where(PLACES[0] > 0, x, y), (FAR, VECTOR)),
    "clamp": (torch.clamp, (FAR, VECTOR, POSITIVE)),
    "atan2": (torch.atan2, (FAR, POSITIVE)),
    "hypot": (torch.hypot, (FAR, VECTOR)),
    "xlogy": (torch.xlogy, (FAR, POSITIVE)),
    "logaddexp": (torch.logaddexp, (FAR, VECTOR)),
    "copysign": (torch.copysign, (FAR, VECTOR)),
    "fmod": (torch.fmod, (FAR, POSITIVE)),
    "remainder": (torch.remainder, (FAR, POSITIVE)),
    "ldexp": (torch.ldexp, (FAR, torch.round(VECTOR))),
    "maximum": (torch.maximum, (FAR, VECTOR)),
    "cross": (torch.linalg.cross, (numbers(1, 3), numbers(1, 3))),
    "outer": (torch.outer, (VECTOR, POSITIVE)),
    "kron": (torch.kron, (VECTOR, POSITIVE)),
    "cdist": (torch.cdist, (SQUARE, SQUARE + 1)),
    "cosine_similarity": (F.cosine_similarity, (FAR, VECTOR[None])),
    "scatter": (lambda x, y: x.scatter(1, PLACES, y), (FAR, VECTOR[None])),
    "scatter_add": (lambda x, y: x.scatter_add(1, PLACES, y), (FAR, VECTOR[None])),
    "index_add": (lambda x, y: x.index_add(1, PLACES[0], y), (FAR, VECTOR[None])),
    "index_put": (lambda x, y: x.index_put((PLACES[0] * 0, PLACES[0]), y), (FAR, VECTOR)),
    "masked_fill": (lambda x, y: x.masked_fill(PLACES > 0, y.sum()), (FAR, VECTOR)),
    "gather": (lambda x: x.gather(1, PLACES), (FAR,)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (numbers(1, 1, 4, 4), numbers(1, 2, 2, 2))),
    "quantile": (lambda x, q: torch.quantile(x, q.sigmoid(), dim=1), (FAR, VECTOR)),
    "attention": (F.scaled_dot_product_attention, (SQUARE[None, None], SQUARE[None, None], SQUARE[None, None], SQUARE)),
    "attention without heads": (F.scaled_dot_product_attention, (SQUARE, SQUARE, SQUARE, SQUARE)),
    "einsum": (lambda x, y: torch.einsum("bi,ij->bj", x, y), (FAR, SQUARE)),
    "einsum of three": (lambda x, y, z: torch.einsum("bi,ij,jk->bk", x, y, z), (FAR, SQUARE, SQUARE)),
    "weighted addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=3), (SQUARE, SQUARE, SQUARE)),
    "addmm of a row": (torch.addmm, (VECTOR, SQUARE, SQUARE)),
    "addmv": (torch.addmv, (VECTOR, SQUARE, VECTOR)),
    "matmul": (torch.matmul, (SQUARE, SQUARE)),
    "matmul of vectors": (lambda x, y: torch.matmul(x, y)[None], (VECTOR, POSITIVE)),
    "matrices": (torch.matmul, (numbers(2, 4, 4), SQUARE)),
    "a vector and matrices": (lambda x, y: torch.matmul(x, y)[None], (VECTOR, numbers(3, 4, 4))),
    "matrices and a vector": (lambda x, y: torch.matmul(x, y)[None], (numbers(3, 4, 4), VECTOR)),
    "rows and matrices": (lambda x, y: torch.matmul(x, y)[None], (numbers(3, 2, 4), numbers(3, 4, 4))),
    "one and several matrices": (lambda x, y: torch.matmul(x, y)[None], (SQUARE, numbers(2, 3, 4, 4))),
    "mv": (torch.mv, (SQUARE, VECTOR)),
    "inner": (torch.inner, (SQUARE, SQUARE)),
    "inner with a number": (torch.inner, (numbers(1)[0], SQUARE)),
    "several with two axes": (lambda x, y: torch.cat([part.reshape(-1) for part in torch.atleast_2d(x, y)]), (VECTOR, SQUARE)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=1), (SQUARE, SQUARE)),
    "linear of a vector": (lambda x, w, b: F.linear(x, w, b), (SQUARE, VECTOR, numbers(1)[0])),
    "conv2d": (F.conv2d, (numbers(1, 2, 3, 3), numbers(2, 2, 2, 2), numbers(2))),
    "conv_transpose2d": (F.conv_transpose2d, (numbers(1, 2, 3, 3), numbers(2, 2, 2, 2), numbers(2))),
    "pairwise_distance": (F.pairwise_distance, (SQUARE, SQUARE + 1)),
    "p-distance": (lambda x, y: F.pairwise_distance(x, y, 3.0, 1.0), (SQUARE, SQUARE + 1)),
    "logaddexp2": (torch.logaddexp2, (FAR, VECTOR)),
    "heaviside": (torch.heaviside, (FAR, VECTOR)),
    "floor_divide": (torch.floor_divide, (FAR, POSITIVE)),
    "sub": (lambda x, y: torch.sub(x, y, alpha=3), (FAR, VECTOR)),
    "rsub": (lambda x, y: torch.rsub(x, y, alpha=3), (FAR, VECTOR)),
    "div": (torch.div, (FAR, POSITIVE)),
    "mul": (torch.mul, (FAR, VECTOR)),
    "cat": (lambda x, y: torch.cat((x, y, x)), (FAR, VECTOR[None])),
    "stack": (lambda x, y: torch.stack((y, x)), (FAR, VECTOR[None])),
    "index_copy": (lambda x, y: x.index_copy(1, PLACES[0, :3], y[:, :3]), (FAR, VECTOR[None])),
    "index_fill": (lambda x, y: x.index_fill(1, PLACES[0, :2], y.sum()), (FAR, VECTOR)),
    "masked_scatter": (lambda x, y: x.masked_scatter(PLACES > 0, y), (FAR, VECTOR)),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 0), (SQUARE, VECTOR)),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 0, 4, 2), (SQUARE, numbers(4, 2))),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y), (SQUARE, VECTOR)),
    "scatter_reduce": (lambda x, y: x.scatter_reduce(1, PLACES, y, "amax"), (FAR, VECTOR[None])),
    "diff": (lambda x, y, z: torch.diff(x, prepend=y, append=z), (FAR, VECTOR[None], FAR)),
    "weight_norm": (lambda v, g, x: F.linear(x, torch._weight_norm(v, g, 0)), (SQUARE, POSITIVE[:, None], FAR)),
    "bilinear alone": (F.bilinear, (FAR, FAR, numbers(3, 4, 4))),
    "hard attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (numbers(1, 1, 4, 4),) * 3),
    "embedding_bag": (lambda w, p: F.embedding_bag(PLACES, w, mode="sum", per_sample_weights=p), (SQUARE, VECTOR[None])),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), (SQUARE,)),
    "lstm": (lambda x, h, c: torch.lstm(x, (h, c), [numbers(16, 4), numbers(16, 4)], False, 1, 0.0, False, False, True)[0],
             (IMAGE.transpose(1, 2), numbers(1, 1, 4), numbers(1, 1, 4))),
    "gru": (lambda x, w: torch.gru(x, numbers(1, 1, 4), [w, w, VECTOR.repeat(3), VECTOR.repeat(3)], True, 1, 0.0, False, False, True)[0],
            (IMAGE.transpose(1, 2), numbers(12, 4))),
}  # fmt: skip
ALONE = [(name, (place,)) for name, (_, operands) in OPERATIONS.items() for place in range(len(operands))]
TWICE = [
    (name, places)
    for name, (_, operands) in OPERATIONS.items()
    for places in combinations(range(len(operands)), 2)
    if operands[places[0]].numel() == operands[places[1]].numel()
]


class Given(nn.Module):
    """An operation whose operands at some places are the input, one sample as a vector; the others are constants."""

    def __init__(self, name: str, places: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.operands = OPERATIONS[name]
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        operands = [x.reshape(operand.shape) if i in self.places else operand for i, operand in enumerate(self.operands)]
        return self.function(*operands).reshape(1, -1)


@pytest.mark.quick(100)
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("name", "places"), ALONE + TWICE)
def test_any_operand(name, places, near):
    """Equal constants are one tensor, which is given to an operation twice."""
    x = OPERATIONS[name][1][places[0]].reshape(1, -1)
    region = ns.Ball(x, 0.01) if near else None
    try:
        found = ns.lipschitz(Given(name, places), x, mode="batch", region=region, effort=0.01)
    except (InternalError, UnforeseenError):
        raise
    except ns.NormscopeError as error:
        assert "\n\n" not in str(error)
    else:
        assert found.lower <= found.upper
