"""What comes back: severities, silence on request, repairs that are proved, and every format."""

import copy
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import normscope as ns
from normscope._doctor.documentation import documentation
from normscope.findings.catalogue import RULES
from normscope.findings.finding import in_ranges
from normscope.findings.sarif import to_github, to_sarif
from tests.doctor.cases import CASES
from tests.doctor.patients import conv, randn


class Silenced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(4, 4)
        self.quiet = nn.Linear(4, 4)  # normscope: ignore NS101, NS102
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.other(self.quiet(torch.relu(self.norm(self.loud(x))))))


def test_worst_first_with_place_numbers_and_fix():
    found = ns.doctor(*_patient("NS101"))
    assert [finding.severity for finding in found] == sorted((f.severity for f in found), key=("error", "warning", "info").index)
    (bias,) = [finding for finding in found if finding.rule == "NS101"]
    assert bias.where == "0" and bias.evidence["parameters"] == 8 and "bias=False" in bias.fix
    assert "NS101 warning 0" in str(found) and "not checked" in str(found)


def test_what_was_checked_and_what_could_not_be_is_said():
    found = ns.doctor(*_patient("NS110"))
    assert set(found.checked) | set(found.not_checked) == set(RULES)
    assert "optimizer=" in found.not_checked["NS301"] and "run=" in found.not_checked["NS403"]


def test_a_clean_model_lists_the_checks_that_ran():
    found = ns.doctor(conv().model, conv().example)
    assert not found and found.worst is None and "NS101" in str(found)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((), ""),
        (("NS101",), "NS101"),
        (("NS102", "NS101"), "NS101, NS102"),
        (("NS101", "NS102", "NS103", "NS105", "NS201"), "NS101 to NS103, NS105, NS201"),
    ],
)
def test_ids_in_a_row_are_shown_as_a_range(rules, text):
    assert in_ranges(rules) == text


def test_a_model_that_cannot_be_traced_is_still_examined():
    class Wild(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=0.0)

        def forward(self, x):
            return self.norm(x) if float(x.sum()) > 0 else x

    found = ns.doctor(Wild(), randn(8, 4))
    assert {finding.rule for finding in found} == {"NS207"}
    assert "traced" in found.not_checked["NS101"]


def test_an_example_on_which_the_model_does_not_run_is_a_mistake():
    with pytest.raises(ns.InputError, match="does not run on inputs of shape"):
        ns.doctor(nn.Linear(4, 2), randn(8, 3))


def test_a_model_on_ids_has_a_structure():
    found = ns.doctor(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.tensor([[2, 0]]))
    assert [(finding.rule, finding.where) for finding in found] == [("NS102", "2")] and "NS404" in found.checked


def test_attention_of_constant_queries_is_checked():
    """Perceivers and DETR ask with parameters, decoders with the ids that are held fixed."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.full((1, 2, 4), 100.0))

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(self.queries, x, x)

    found = ns.doctor(Asks(), torch.eye(4)[None] * torch.arange(4.0))
    assert [finding.rule for finding in found] == ["NS404"]


def test_a_model_that_draws_in_eval_mode_leaves_random_state_alone():
    class Draws(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 0 * torch.rand([])

    model, state = Draws(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.get_rng_state()
    ns.doctor(model, randn(8, 4), data=randn(16, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_select_ignore_and_comments():
    assert {f.rule for f in ns.doctor(*_patient("NS101"), select=["NS1"])} == {"NS101"}
    assert not ns.doctor(*_patient("NS101"), ignore=["NS101"])
    assert [f.where for f in ns.doctor(Silenced(), randn(8, 4)) if f.rule == "NS101"] == ["loud"]
    with pytest.raises(ns.InputError, match="NS999"):
        ns.doctor(*_patient("NS101"), select=["NS999"])


def test_a_dropped_bias_leaves_the_function_as_it_was():
    model, example = _patient("NS101")
    for _ in range(3):
        model.train()(randn(16, 3, 6, 6))
    before, kept = model.eval()(example), copy.deepcopy(model.state_dict())
    found = ns.doctor(model, example)
    mended = found.apply()
    assert mended[0].bias is None and model[0].bias is not None
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.allclose(mended.eval()(example), before, atol=1e-5)
    (repair,) = found.repairs
    assert repair.rule == "NS101" and repair.change < 1e-5
    assert not [f for f in ns.doctor(mended, example) if f.rule == "NS101"]


def test_a_parametrization_is_taken_off_and_the_weight_kept():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3, bias=False)), nn.BatchNorm2d(4), nn.ReLU())
    found = ns.doctor(model, randn(8, 3, 6, 6))
    mended = found.apply()
    assert not parametrize.is_parametrized(mended[0]) and parametrize.is_parametrized(model[0])
    assert [repair.change < 1e-6 for repair in found.repairs] == [True]


@pytest.mark.parametrize("rule", ["NS206", "NS307"])
def test_other_repairs_remove_their_finding(rule):
    patient = CASES[rule][0]()
    mended = ns.doctor(patient.model, patient.example, select=[rule]).apply()
    assert not ns.doctor(mended, patient.example, select=[rule])


def test_json_and_baseline():
    found = ns.doctor(*_patient("NS101"))
    document = json.loads(found.to_json())
    assert {row["rule"] for row in document["findings"]} == {"NS101"} and document["not_checked"]
    assert not found.without({finding.key for finding in found})


def test_github_annotations_are_one_line_each():
    lines = to_github(ns.doctor(*_patient("NS101")))
    assert all(line.startswith("::warning ") and "\n" not in line and "NS101" in line for line in lines)


def test_sarif_follows_the_official_schema(sarif_schema):
    jsonschema = pytest.importorskip("jsonschema")
    for rule in ("NS101", "NS201", "NS106", "NS304"):
        patient = CASES[rule][0]()
        document = to_sarif(ns.doctor(patient.model, patient.example, **patient.settings), "models.py:net")
        assert document["runs"][0]["results"]
        jsonschema.validate(json.loads(json.dumps(document)), sarif_schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": "2.1.0"}, sarif_schema)


@pytest.fixture(scope="module")
def sarif_schema(tmp_path_factory):
    """The schema of the standard, from a package that carries it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, so the SARIF schema cannot be fetched")
    place = tmp_path_factory.mktemp("sarif")
    fetched = subprocess.run(
        ["npm", "pack", "--silent", "@microsoft/jest-sarif@1.0.0-beta.0"], cwd=place, capture_output=True, timeout=120
    )
    archives = list(place.glob("*.tgz"))
    if fetched.returncode or not archives:
        pytest.skip("the package with the SARIF schema cannot be fetched")
    with tarfile.open(archives[0]) as archive:
        return json.load(archive.extractfile("package/lib/schemas/sarif-2.1.0-rtm.5.json"))


def test_the_page_is_made_from_the_rules():
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    assert page.read_text(encoding="utf-8") == documentation(), "run: python -m normscope._doctor > docs/doctor.md"


def _patient(rule):
    patient = CASES[rule][0]()
    return patient.model, patient.example


def test_rules_that_are_left_out_on_large_models_are_listed_with_the_way_to_run_them(monkeypatch):
    patient = conv()
    settings = {"optimizer": torch.optim.SGD(patient.model.parameters(), lr=0.1), "select": ["NS303", "NS304"]}
    monkeypatch.setattr("normscope.findings.subject.MOST_PARAMETERS", 10)
    found = ns.doctor(patient.model, patient.example, **settings)
    assert not found.checked and set(found.not_checked) == {"NS303", "NS304"}
    assert "pass symmetries=ns.symmetries(model, example)" in " ".join(str(found).split())
    report = ns.symmetries(patient.model, patient.example)
    assert ns.doctor(patient.model, patient.example, symmetries=report, **settings).checked == ("NS303", "NS304")


def test_a_learning_rate_is_judged_on_models_that_return_more_than_a_tensor():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"logits": self.layer(x), "hidden": x}

    model, data = Named(), (randn(16, 4), torch.arange(16) % 3)
    for rate, expected in ((1e4, ["NS310"]), (1e-3, [])):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        assert [f.rule for f in ns.doctor(model, data[0], data=data, optimizer=optimizer, select=["NS310"])] == expected
