"""A maker of writes: in place, into views, through `out=`, into copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.sweep.choices import any_axis, any_indices, any_mask, any_slice


def write(draw, x, parameter):
    axis, a = any_axis(draw, x), draw(100.0, -3.0, 0.0, 0.5)
    span, row = any_slice(draw, x.shape[1]), parameter(*x.shape[2:]) if x.dim() > 2 else parameter(1)
    mask, index = any_mask(draw, x), any_indices(draw, x.shape[1], 1)

    def halves(x):
        y = x * 1
        first, _ = y.chunk(2, axis)
        first.mul_(a)
        return y

    def rows(x):
        y = x + 0
        for place, part in enumerate(y.unbind(1)):
            part.mul_(1 + place)
        return y

    def table(x):
        scale = torch.ones(x.shape[1:], dtype=x.dtype)
        for place, part in enumerate(scale):
            part.add_(place)
        return x * scale

    def slices(x):
        y = x.clone()
        y[:, span] *= a
        y[:, 0] = row()
        return y

    def quietly(x):
        y = x * 2
        with torch.no_grad():
            y[:, span] *= a
        return y

    def onto(x):
        y = x * 1
        torch.mul(x[:, :1], 50.0, out=y[:, :1])
        return y

    def through_views(x):
        y = x.clone()
        y.view(y.shape[0], -1)[:, ::2].add_(y.flatten(1)[:, :1])
        return y

    def transposed(x):
        y = x * 1
        y.transpose(1, -1).relu_()
        return y

    def saved(x):
        y = x * 1
        z = y * 3
        y.add_(1).mul_(a)
        return y + z

    def together(x):
        y = x * 1
        torch._foreach_mul_([y], a)
        return y

    def copied(x):
        y = torch.empty_like(x)
        y.copy_(x.flip(1))
        y[:, 0].fill_(1.0)
        return y

    def masked(x):
        y = x.clone()
        y[:, mask] = 0.0
        return y.masked_fill_(mask, a)

    def placed(x):
        y = torch.zeros_like(x)
        y[:, index] = x[:, index]
        y.index_add_(1, index, x[:, :1])
        return y

    def relu_in_place(x):
        y = x * 1
        z = y[:, :1]
        F.relu(y, inplace=True)
        return y + z

    def expanded(x):
        y = x.unsqueeze(1).repeat(1, 2, *[1] * (x.dim() - 1))
        y[:, 1] -= y[:, 0] * a
        return y

    return draw(
        halves, rows, table, slices, quietly, onto, through_views, transposed, saved, together, copied, masked, placed, relu_in_place, expanded
    )  # fmt: skip
