"""Comparing bounds: scores on families whose ranking is known, and every bound of real models in one table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import kendalltau
from torch import nn

import normscope as ns
from normscope.bounds.bound import GAP, MEASURE, RISK, Bound
from normscope.bounds.comparison import Environment, FamilyComparison, Member
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from tests.bounds.models import batch_norm, data, plain

WIDTHS, RATES = (8, 16, 32), (0.1, 0.2)


def true_gap(width: int, rate: float) -> float:
    return 0.01 * width + rate


def family(
    measure: Callable[[int, float], float], error: float = 0.0, gap: Callable[[int, float], float] = true_gap
) -> FamilyComparison:
    """A grid of widths and rates, with the measure `m` as given."""
    return FamilyComparison(
        tuple(
            Member(
                f"{width}, {rate}", {"width": width, "rate": rate}, gap(width, rate), error, {"zero-one": 0.05},
                {"m": Bound("m", Magnitude(measure(width, rate)), GAP, "zero-one", 1.0, MEASURE)},
            )
            for width in WIDTHS
            for rate in RATES
        ),
        "zero-one",
    )  # fmt: skip


def test_a_measure_that_ranks_as_the_gap_does_is_perfect():
    found = family(lambda width, rate: 1e6 * true_gap(width, rate) ** 3)
    assert found.kendall("m") == 1 and found.granulated("m") == {"width": 1.0, "rate": 1.0}
    assert found.robust_sign_error("m")[0] == 0


def test_a_measure_the_other_way_round_and_one_that_sees_nothing():
    reverse, blind = family(lambda *setup: 1 / true_gap(*setup)), family(lambda *_: 2.0)
    assert reverse.kendall("m") == -1 and reverse.robust_sign_error("m")[0] == 1
    assert blind.kendall("m") == 0 and blind.robust_sign_error("m")[0] == 0.5


def test_failure_in_one_environment_is_found_where_it_is():
    found = family(lambda width, rate: 100 * rate + (0.01 * width if width < 32 else 0))
    assert found.granulated("m")["rate"] == 1 and -1 < found.granulated("m")["width"] < 1
    worst, where = found.robust_sign_error("m")
    assert worst == 1 and where in (Environment("width", (8, 32)), Environment("width", (16, 32)))
    assert found.sign_errors("m")[Environment("width", (8, 16))] == 0 and str(where).startswith("width ")


def test_kendall_is_that_of_scipy_without_ties():
    generator = torch.Generator().manual_seed(0)
    values = {(w, r): float(torch.rand((), generator=generator)) for w in WIDTHS for r in RATES}
    found = family(lambda width, rate: values[width, rate])
    gaps = [member.gap for member in found.members]
    assert found.kendall("m") == pytest.approx(kendalltau(list(values.values()), gaps).statistic)


def test_gaps_that_noise_explains_do_not_count():
    found = family(lambda *setup: 1 / true_gap(*setup), error=10.0)
    assert found.sign_errors("m") == {} and math.isnan(found.robust_sign_error("m")[0])
    assert "–" in str(found) and json.dumps(found.to_dict(), allow_nan=False)


def test_a_bound_on_a_risk_states_the_gap_above_the_sample():
    member = Member("a", {}, 0.1, 0.0, {"zero-one": 0.3, "ramp": 0.4}, {
        "risk": Bound("risk", Magnitude(0.7), RISK, "zero-one", 1.0), "other": Bound("other", Magnitude(0.7), RISK, "ramp", 1.0),
        "low": Bound("low", Magnitude(0.2), RISK, "zero-one", 1.0), "huge": Bound("huge", Magnitude.from_log10(400), RISK, "ramp", 1.0),
    })  # fmt: skip
    assert float(member.predicted("risk")) == pytest.approx(0.4) and float(member.predicted("other")) == pytest.approx(0.3)
    assert member.predicted("low") == 0 and member.predicted("huge").log10 == pytest.approx(400)
    assert member.predicted("absent") is None


def test_values_beyond_all_floats_are_ranked_and_drawn():
    found = FamilyComparison(
        tuple(
            Member(str(k), {"k": k}, k, 0.0, {}, {"m": Bound("m", Magnitude.from_log10(400 + k), GAP, "l1", 2.0, MEASURE)})
            for k in range(3)
        ),
        "l1",
    )
    assert found.kendall("m") == 1
    assert list(found.figure().data[0].y) == pytest.approx([400, 401, 402])


def test_every_bound_of_a_family_of_models():
    models = [
        ns.bounds.Trained(make(3, 2), {"normalizer": make.__name__, "scale": scale})
        for make in (plain, batch_norm)
        for scale in (1, 2)
    ]
    for trained in models:
        with torch.no_grad():
            trained.model[-1].weight *= trained.hyperparameters["scale"]
    only = ["held-out Hoeffding", "Golowich et al. 2018", "Neyshabur et al. 2018", "VC dimension (Bartlett et al. 2019)"]
    seen: list[int] = []
    found = ns.bounds.compare(
        models, "ramp", data(50, 3), held_out=data(50, 3, seed=1), select=only, progress=lambda what, done, total: seen.append(done)
    )
    assert set(found.names) == set(only) and seen == [1, 2, 3, 4] and found.hyperparameters == ("normalizer", "scale")
    text = str(found)
    assert "4 models" in text and "certified" in text and "measure" in text and max(map(len, text.splitlines())) <= 100
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(content["members"]) == 4 and {score["name"] for score in content["scores"]} == set(only)
    assert len(found.figure().data) >= len(only)
    member = found.members[0]
    assert member.gap == pytest.approx(float(member.bounds["held-out Hoeffding"].parts["F(H, h)"]) - member.empirical["ramp"])


def test_models_by_name_and_too_few():
    found = ns.bounds.compare({"a": plain(), "b": batch_norm()}, "ramp", data(30), held_out=data(30), select=["held-out Hoeffding"])
    assert [member.name for member in found.members] == ["model a", "model b"]
    with pytest.raises(InputError, match="at least two"):
        ns.bounds.compare([ns.bounds.Trained(nn.Linear(2, 2))], "ramp", data(9), held_out=data(9))
