"""More than one case for rules with more than one law; the part before the colon names the rule."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

from tests.cases.parts import (
    GRID,
    KEYS,
    MATRIX,
    QUERIES,
    VALUES,
    VECTOR,
    ZEROS,
    Case,
    affine,
    attention,
    on,
    running,
    tripled,
    within,
)
from tests.networks import Function

VARIANTS: dict[str, Case] = {
    **on(
        (1, 3),
        {
            "gelu: tanh": nn.GELU("tanh"),
            "add: branches": lambda x: x + 2 * x.flip(1),
            "std: std_mean": lambda x: torch.std_mean(x, 1, keepdim=True)[0],
            "mean: std_mean": lambda x: torch.std_mean(x[0], correction=0)[1][None],
            "var: var_mean": within(-1, 1, lambda x: torch.var_mean(x[:, :2], 1, unbiased=False)[0]),
            "mean: var_mean": lambda x: torch.var_mean(x, 1)[1],
            "matmul: multi_dot": lambda x: torch.linalg.multi_dot([x, MATRIX[:3, :2], MATRIX[:2, :3]]),
            "add: addmm": lambda x: torch.addmm(x, x.flip(1), torch.eye(3), beta=0.5, alpha=2),
            "mul: of lists": lambda x: torch.cat(torch._foreach_mul([x, 2 * x], 3.0), 1),
            "mul: of lists in place": lambda x: torch.cat(tripled([x + 1, x.flip(1)]), 1),
            "add: of lists": lambda x: torch.cat(torch._foreach_add([x, x.flip(1)], [x, x.flip(1)], alpha=2), 1),
            "sub: of lists": lambda x: torch.cat(torch._foreach_sub([x], [1.0]), 1),
            "tanh: of lists": lambda x: torch.cat(torch._foreach_tanh([x, x]), 1),
            "clamp_min: of lists": lambda x: torch.cat(torch._foreach_maximum([x, x], 0.5), 1),
            "addcmul: of lists": lambda x: torch.cat(torch._foreach_addcmul([x], [x], [VECTOR[None, :3].abs()], 2.0), 1),
            "lerp: of lists": lambda x: torch.cat(torch._foreach_lerp([x], [x], 0.3), 1),
            "pow: of lists": within(-1, 1, lambda x: torch.cat(torch._foreach_pow([x], 2), 1)),
            "cdist: of order 1": lambda x: torch.cdist(x[:, None], VECTOR[None, None, :3], p=1.0),
            "cosine_similarity: of two": lambda x: functional.cosine_similarity(x, x.flip(1), eps=1.0),
            "mul: branches": within(-2, 2, lambda x: x * x.abs()),
            "div: branches": within(1, 2, lambda x: (3 - x) / x),
            "div: numerator": within(0.5, 2, lambda x: torch.div(torch.ones(3), x)),
            "dot: branches": within(-1, 1, lambda x: torch.dot(x[0], x[0])[None]),
            "matmul: branches": within(-1, 1, lambda x: x.unsqueeze(1) @ x.unsqueeze(2)),
            "einsum: branches": within(-1, 1, lambda x: torch.einsum("bi,bi->b", x, x)),
            "einsum: bilinear": within(-1, 1, lambda x: functional.bilinear(x, x, torch.eye(3)[None], VECTOR[:1])),
            "clamp: tensors": lambda x: x.clamp(-torch.ones(3), torch.tensor([1.0, 2.0, 3.0])),
            "pow: base": within(-1, 2, lambda x: 2.0**x),
            "linear: one output": nn.Linear(3, 1),
            "linalg_vector_norm: 2": lambda x: torch.linalg.vector_norm(x, dim=1),
            "linalg_vector_norm: 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
            "std: population": lambda x: x.std(1, correction=0),
            "standardize: rms": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 0.1),
            "standardize: layer": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1),
            "standardize: floor": lambda x: functional.normalize(x, dim=1, eps=0.1),
            "batch_norm: running": running(nn.BatchNorm1d(3)),
            "layer_norm: affine": affine(nn.LayerNorm(3, eps=0.1)),
            "rms_norm: affine": affine(nn.RMSNorm(3, eps=0.1)),
            "scaled_dot_product_attention: values": lambda x: attention(QUERIES, KEYS, x[:, :2, None]),
            "index_put: accumulate": lambda x: torch.zeros(1, 2).index_put((ZEROS, ZEROS), x[0], accumulate=True),
        },
    ),
    **on(
        (1, 4, 4, 4),
        {
            "group_norm: affine": affine(nn.GroupNorm(2, 4, eps=0.1)),
            "instance_norm: affine": affine(nn.InstanceNorm2d(4, eps=0.1, affine=True)),
            "instance_norm: running": running(nn.InstanceNorm2d(4, track_running_stats=True)),
            "max_pool2d: disjoint": nn.MaxPool2d(2),
            "avg_pool2d: borders": nn.AvgPool2d(2, padding=1, count_include_pad=False),
            "conv2d: grouped": nn.Conv2d(4, 4, 3, groups=2),
            "grid_sampler: border": lambda x: functional.grid_sample(x, GRID, padding_mode="border", align_corners=True),
            "grid_sampler: cubic": lambda x: functional.grid_sample(x, GRID, mode="bicubic", align_corners=False),
            "conv2d: reflect": nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect"),
            "conv2d: same": nn.Conv2d(4, 4, 2, padding="same"),
            "pad: constant": lambda x: functional.pad(x, (1, 1), value=3.0),
            "pad: replicate": lambda x: functional.pad(x, (2, 2, 2, 2), mode="replicate"),
        },
    ),
}

# In its keys attention's bound is a factor √2 above what two keys can reach, and one query cannot do worse.
VARIANTS.update(
    on(
        (1, 2, 4),
        {
            "slice: split": lambda x: x.split(3, 2)[1],
            "slice: split_with_sizes": lambda x: x.split([1, 3], 2)[-1],
            "slice: chunk": lambda x: x.chunk(3, -1)[1],
            "slice: tensor_split": lambda x: x.tensor_split(3, 2)[0],
            "slice: tensor_split at": lambda x: x.tensor_split([1, 3], 2)[1],
            "slice: hsplit": lambda x: x.hsplit(2)[0],
            "slice: vsplit": lambda x: x[0].vsplit(2)[0][None],
            "slice: dsplit": lambda x: x.dsplit(2)[0],
            "select: unbind": lambda x: x.unbind(-1)[-2],
        },
    )
)
VARIANTS["scaled_dot_product_attention: keys"] = Case(
    Function(lambda x: attention(QUERIES[:, :1], functional.hardtanh(x)[:, :2, None], VALUES)), torch.zeros(1, 3)
)
