"""Margins: signed, the same however the data come, and normalized by constants that are certified."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import normscope as ns
from normscope.bounds.margins import Margins
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from tests.bounds.models import batch_norm, data, seeded


def by_hand(outputs: torch.Tensor, labels: torch.Tensor) -> list[float]:
    return [
        float(row[label]) - max(float(value) for other, value in enumerate(row) if other != label)
        for row, label in zip(outputs.double(), labels.tolist(), strict=True)
    ]


def test_margins_are_signed_and_as_by_hand():
    model, (inputs, labels) = seeded(nn.Linear(3, 5)), data(40, 3, 5)
    found = ns.bounds.margins(model, (inputs, labels))
    with torch.no_grad():
        assert found.values.tolist() == by_hand(model(inputs), labels)
    assert (found.values < 0).any() and (found.values > 0).any()
    assert found.accuracy == float((found.values > 0).mean())


def test_ties_are_wrong_and_the_only_class_left_counts():
    class Logarithm(nn.Module):
        def forward(self, x):
            return x.log()

    found = ns.bounds.margins(Logarithm(), (torch.tensor([[2.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 1])), constant=False)
    assert found.values.tolist() == [0.0, math.inf] and found.accuracy == 0.5


@pytest.mark.parametrize("form", ["dataset", "list", "dicts"])
def test_margins_do_not_depend_on_the_form_of_the_data(form):
    model, (inputs, labels) = batch_norm(), data(50)
    forms = {
        "dataset": TensorDataset(inputs, labels),
        "list": [(inputs[:7], labels[:7]), (inputs[7:], labels[7:])],
        "dicts": [{"input": inputs[:30], "label": labels[:30]}, {"input": inputs[30:], "label": labels[30:]}],
    }
    whole, parts = ns.bounds.margins(model, (inputs, labels)), ns.bounds.margins(model, forms[form], batch_size=9)
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-5, atol=1e-6)
    assert parts.constant == whole.constant


def test_the_model_comes_back_as_it_was():
    model = batch_norm().train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    ns.bounds.margins(model, data(30), radius=0.1, local_samples=2)
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_no_closer_input_changes_a_right_answer():
    """Within values/(√2 L) of a sample the answer stays: searched for by steps along the gradient of the margin."""
    model, (inputs, labels) = batch_norm(), data(40)
    found = ns.bounds.margins(model, (inputs, labels), radius=0.5, local_samples=40)
    local = np.minimum(found.locally_normalized, 0.5)
    assert (found.locally_normalized >= found.normalized * (1 - 1e-9))[found.values > 0].all()
    for index in np.flatnonzero(found.values > 0):
        point = inputs[index : index + 1].clone().requires_grad_()
        outputs = model.eval()(point)
        label = int(labels[index])
        (gradient,) = torch.autograd.grad(outputs[0, label] - outputs[0, 1 - label], point)
        step = -gradient / gradient.norm().clamp(min=1e-12) * max(local[index], found.normalized[index]) * (1 - 1e-6)
        assert int(model(point + step).argmax()) == label


def test_normalized_margins_survive_huge_constants():
    found = Margins(np.array([3.0, -2.0, 0.0]), np.array([0, 1, 0]), Magnitude.from_log10(200))
    np.testing.assert_allclose(found.normalized, [3e-200 / math.sqrt(2), -2e-200 / math.sqrt(2), 0.0])
    assert "1.00e+200" in str(found)


def test_without_a_rule_margins_stay_and_the_reason_is_said():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.qr(x.reshape(-1, 2, 2))[0].flatten(1)[:, :2]

    found = ns.bounds.margins(
        Odd(), (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, dtype=torch.long))
    )
    assert found.constant is None and "qr" in found.reason and "qr" in str(found)
    with pytest.raises(InputError, match="qr"):
        found.normalized  # noqa: B018


def test_classes_percentiles_and_json():
    found = ns.bounds.margins(seeded(nn.Linear(3, 5)), data(60, 3, 5))
    assert found.classes == (0, 1, 2, 3, 4)
    assert sum(len(found.of_class(label)) for label in found.classes) == len(found) == 60
    assert found.percentile(50) == np.median(found.values)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["schema"] == "normscope.margins/1" and set(content["classes"]) == set("01234")
    assert "60 samples" in str(found) and max(map(len, str(found).splitlines())) <= 100
    assert len(found.figure().data) == len(found.figure(normalized=True).data) == 2


@pytest.mark.parametrize(
    ("outputs", "labels", "said"),
    [
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.long), "at least two classes"),
        (torch.randn(4, 3), torch.zeros(4), "integer targets"),
        (torch.randn(4, 3), torch.full((4,), 3), "do not index"),
        (torch.full((4, 3), math.nan), torch.zeros(4, dtype=torch.long), "data hold nan"),
    ],
)
def test_bad_input_is_one_line(outputs, labels, said):
    with pytest.raises(InputError, match=said) as caught:
        ns.bounds.margins(nn.Identity(), (outputs, labels))
    assert "\n" not in str(caught.value)
