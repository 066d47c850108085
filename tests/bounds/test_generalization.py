"""`ns.generalization`: any form of data, nothing of the user's touched, nothing skipped in silence, killed and resumed alike."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normscope as ns
from normscope.bounds.bound import MEASURE, Bound
from normscope.bounds.generalization import generalization
from normscope.bounds.losses import loss_of
from normscope.bounds.partition import Partition
from normscope.bounds.saved_columns import SavedColumns
from normscope.bounds.setting import Setting
from normscope.bounds.table import TABLE, bounds_of
from normscope.bounds.theorems.held_out import clopper_pearson, hoeffding
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from tests.bounds.models import batch_norm, data, layer_norm, plain

OWN = [name for name in TABLE if name.startswith(("held-out", "Than 2025"))]


def values(found) -> dict[str, float]:
    return {bound.name: bound.value.log for bound in found}


def test_held_out_bounds_by_hand():
    assert hoeffding(0.25, 200, 2.0, 0.05) == pytest.approx(0.25 + 2 * math.sqrt(math.log(20) / 400))
    assert clopper_pearson(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert clopper_pearson(100, 100, 0.05) == 1.0
    assert binom.cdf(7, 50, clopper_pearson(7, 50, 0.1)) == pytest.approx(0.1)


def test_the_model_and_the_random_state_stay_as_they_are():
    model = batch_norm().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.random.get_rng_state()
    generalization(model, "l1", data(100), held_out=data(40, seed=1), select=OWN)
    assert model.training and all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(before, torch.random.get_rng_state())


def test_every_form_of_data_gives_the_same():
    train, held_out = data(100), data(40, seed=1)
    forms = [
        train,
        TensorDataset(*train),
        DataLoader(TensorDataset(*train), batch_size=7),
        [(train[0][:33], train[1][:33]), (train[0][33:], train[1][33:])],
        [{"input": train[0], "label": train[1]}],
    ]
    expected = values(generalization(batch_norm(), "l1", train, held_out=held_out, select=OWN))
    for form in forms:
        found = values(generalization(batch_norm(), "l1", form, held_out=held_out, select=OWN, batch_size=9))
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_model_on_images_with_named_arguments():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.body(image)

    x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 3
    batches = [{"image": x[:25], "target": y[:25]}]
    found = generalization(Named(), "ramp", batches, held_out=(x[25:], y[25:]), domain=ns.Box(0, 1), partition=["voronoi", "grid"])
    assert found["Than 2025, Theorem 20, local constants"].certified
    assert found["Than 2025, Theorem 20, local constants"].parts["N"] % 3 == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    found = generalization(
        plain().to(dtype), "l1", data(60), held_out=data(40, seed=1), select=["Than 2025, largest gradient", "held-out Hoeffding"]
    )
    assert all(bound.value.finite for bound in found)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_huge_and_tiny_inputs(scale):
    x, y = data(60)
    held_out = data(40, seed=1)
    found = generalization(batch_norm(), "l1", (scale * x, y), held_out=(scale * held_out[0], held_out[1]), select=OWN)
    assert all(bound.value.finite for bound in found) and len(found) >= 8


def test_one_sample_and_one_class():
    found = generalization(plain(), "l1", data(1), held_out=data(40, seed=1), select=OWN)
    assert found["Than 2025, Theorem 20, local constants"].vacuous
    x, y = data(50)
    found = generalization(plain(), "l1", (x, y * 0), held_out=data(40, seed=1), select=OWN)
    assert found["Than 2025, Theorem 20, local constants"].certified


def test_what_is_not_given_says_why():
    found = generalization(plain(), "l1", data(50))
    assert not any(bound.name.startswith(("held-out", "Than")) for bound in found)
    assert "held_out=" in found.not_given["held-out Hoeffding"]
    assert "held_out=" in found.not_given["Than 2025, local constants"]
    assert all(name in str(found) for name in OWN)


def test_real_targets_have_no_cells():
    def gap(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets).abs().clamp(max=1)

    (x, _), (z, _) = data(50), data(40, seed=1)
    found = generalization(plain(), gap, (x, x[:, 0]), held_out=(z, z[:, 0]), loss_bound=1.0)
    assert "held-out Hoeffding" in values(found)
    assert "classes" in found.not_given["Than 2025, local constants"] and "margins" in found.not_given["held-out binomial"]


def test_a_model_without_a_certificate_still_gets_estimates():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0e(self.layer(x))

    found = generalization(Odd(), "l1", data(60), held_out=data(40, seed=1), select=OWN)
    assert "no certificate" in found.not_given["Than 2025, local constants"]
    assert "Than 2025, Theorem 20, largest ratio" in values(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta must be a probability"),
        ({"delta": 1.0}, "delta must be a probability"),
        ({"delta": 5e-324}, "delta must be a probability"),
        ({"delta": "a"}, "delta must be a probability"),
        ({"loss": "hinge"}, "loss must be one of"),
        ({"train": (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))}, "above 0"),
        ({"train": (torch.full((4, 2), math.nan), torch.zeros(4, dtype=torch.long))}, "nan"),
        ({"train": (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))}, "does not run|shape"),
        ({"train": torch.zeros(4, 2)}, "inputs, targets"),
        ({"only": ["Bayes"]}, "no bound 'Bayes'"),
        ({"partition": "cubes"}, "a partition must be one of"),
        ({"domain": ns.Box(torch.zeros(3), torch.ones(3))}, "a sample has"),
        ({"model": 3}, "nn.Module"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {"model": plain(), "loss": "l1", "train": data(20), "held_out": data(20, seed=1), "only": OWN} | change
    with pytest.raises(InputError, match=message):
        generalization(**given)


def test_tokens_have_no_distances():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    x = torch.arange(40).reshape(20, 2) % 5
    found = generalization(model, "l1", (x, torch.arange(20) % 2), held_out=(x, torch.arange(20) % 2), select=OWN)
    assert "real numbers" in found.not_given["Than 2025, local constants"] and found["held-out Hoeffding"].certified


def test_a_model_that_cannot_be_traced_still_gets_the_rest():
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([row if row.sum().item() > 1e9 else 2 * row for row in x])

    found = generalization(Branching(), "l1", data(60), held_out=data(40, seed=1), select=OWN)
    assert "certified constant" in found.not_given["Than 2025, local constants"]
    assert "Than 2025, Theorem 20, largest gradient" in values(found)


def test_labels_beyond_the_outputs_are_named():
    with pytest.raises(InputError, match="do not index 2 outputs"):
        generalization(plain(), lambda z, y: z[:, 0] * 0, (data(20)[0], torch.full((20,), 7)), loss_bound=1.0)


def test_a_loader_that_shuffles_is_read_once():
    loader = DataLoader(TensorDataset(*data(60)), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))
    found = generalization(batch_norm(), "l1", loader, held_out=data(40, seed=1), select=OWN)
    expected = generalization(batch_norm(), "l1", data(60), held_out=data(40, seed=1), select=OWN)
    assert values(found) == pytest.approx(values(expected), rel=1e-4)


def test_a_model_whose_samples_touch_each_other_has_no_loss_per_sample():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    with pytest.raises(InputError, match="influence each other"):
        generalization(model, "l1", data(20), held_out=data(20, seed=1))


class Rows(nn.Linear):
    def forward(self, x):
        return torch.stack([super(Rows, self).forward(row) for row in x])


@pytest.mark.parametrize(("layer", "count"), [(nn.Linear, 0), (Rows, 1)])
def test_bounds_say_where_it_is_not_proved_that_samples_stay_apart(layer, count):
    bounds = generalization(
        nn.Sequential(nn.Linear(2, 4), nn.ReLU(), layer(4, 2)), "l1", data(20), held_out=data(20, seed=1), select=OWN
    )
    for bound in bounds:
        assert sum("probed, not proved" in assumption for assumption in bound.assumptions) == count


def test_the_table_is_open():
    @bounds_of("mine")
    def mine(setting: Setting):
        yield setting.bound("mine", setting.loss.bound, "risk", parts={"C": setting.loss.bound})

    try:
        assert generalization(plain(), "ramp", data(20), select=["mine"])[0].vacuous
        with pytest.raises(ValueError, match="overwrite=True"):
            bounds_of("mine")(mine)
    finally:
        TABLE.pop("mine")


def test_bounds_print_and_become_json():
    found = generalization(layer_norm(), "l1", data(100), held_out=data(40, seed=1), select=OWN)
    text = str(found)
    assert all(word in text for word in ("certified", "estimate", "vacuous", "100 training samples"))
    assert all(len(line) <= 100 for line in text.splitlines())
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(content["bounds"]) == len(found)
    assert found[found[0].name] is found[0] and found.best is found[0]
    for bound in found:
        assert bound.name in str(bound).replace("\n", " ")


def test_measures_are_never_called_vacuous():
    measure = Bound("number", Magnitude.from_log10(80), "risk", "l1", 2.0, MEASURE)
    assert not measure.vacuous and not measure.certified and measure.verdict == "to compare by"
    assert Bound("bound", Magnitude(2), "risk", "l1", 2.0).vacuous
    assert json.dumps(measure.to_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="no quantity"):
        Bound("bound", Magnitude(2), "hope", "l1", 2.0)


# checkpoints ---------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stop_after(batches: int):
    """A progress report that ends the pass."""

    def report(what: str, done: int, expected: int) -> None:
        if what.startswith("train") and done >= 8 * batches:
            raise Stopped

    return report


def settings(path: Path | None, train=None, model: nn.Module | None = None, **options) -> Setting:
    return Setting(
        model or batch_norm(), loss_of("l1"), train or data(80), data(40, seed=1), partition=Partition("voronoi", 4), cellwise=True,
        batch_size=8, checkpoint=path, **options,
    )  # fmt: skip


def test_a_stopped_pass_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("normscope.bounds.saved_columns.SECONDS", 0.0)
    expected = settings(None).train.columns
    path = tmp_path / "pass.safetensors"
    for batches in (1, 4, 9):
        with pytest.raises(Stopped):
            _ = settings(path, progress=stop_after(batches)).train.columns
        assert len(SavedColumns(path, settings(path).train.checkpoint.key).load()[0]["loss"]) == 8 * batches
    looked = []
    resumed = settings(path).train
    look = resumed._look
    monkeypatch.setattr(resumed, "_look", lambda batch: looked.append(batch.size) or look(batch))
    assert all(torch.equal(resumed.columns[name], column) for name, column in expected.items())
    assert looked == [8]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = tmp_path / "pass.safetensors"
    _ = settings(path).train.columns
    with pytest.raises(InputError, match="another model"):
        _ = settings(path, model=layer_norm()).train.columns
    with pytest.raises(InputError, match="other data"):
        _ = settings(path, train=data(80, seed=5)).train.columns
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is not a checkpoint"):
        _ = settings(path).train.columns


def test_killed_without_warning_and_resumed(tmp_path):
    """kill -9 in the middle of the pass: what is on disk is complete, and the result is the same as without the interruption."""
    path = tmp_path / "pass.safetensors"
    script = textwrap.dedent(f"""
        import os, signal
        import normscope.bounds.saved_columns as checkpoints
        checkpoints.SECONDS = 0.0
        from tests.bounds.test_generalization import settings
        def report(what, done, expected):
            if what.startswith("train") and done >= 40:
                os.kill(os.getpid(), signal.SIGKILL)
        settings({str(path)!r}, progress=report).train.columns
    """)
    ended = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    expected, resumed = settings(None).train.columns, settings(path).train.columns
    assert all(torch.equal(resumed[name], column) for name, column in expected.items())
