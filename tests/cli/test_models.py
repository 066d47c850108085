"""MODEL and --weights: every form is found, and everything that can be wrong with them is one line that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normscope.cli.models import load_model, load_weights
from normscope.core.errors import InputError
from normscope.lab.models import mlp

SOURCE = """
from dataclasses import dataclass
from torch import nn

def make():
    return nn.Linear(3, 2)

def needs(width, depth=3):
    return nn.Linear(width, 2)

def fails():
    raise RuntimeError("no luck\\nand more")

def number():
    return 3

class Outer:
    make = staticmethod(make)

made = nn.Linear(3, 2)
text = "a string"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, with a model file; modules imported from there do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "network.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("spec", ["network.py:make", "network:make", "network.py:Outer.make", "network.py:made"])
def test_forms_of_a_callable(place: Path, spec: str) -> None:
    model = load_model(spec)
    assert isinstance(model, nn.Linear) and model.in_features == 3


def test_a_module_of_the_package_and_its_siblings(place: Path) -> None:
    (place / "user.py").write_text("from network import make")
    assert isinstance(load_model("user.py:make"), nn.Linear)
    assert isinstance(load_model("normscope.lab.models:mlp"), nn.Sequential)


def test_an_exported_program(place: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),)), "linear.pt2")
    assert isinstance(load_model("linear.pt2"), torch.export.ExportedProgram)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("resnet18", "'resnet18' is not of a known form: write package.module:callable"),
        ("network.py:", "is not of a known form"),
        ("missing.py:make", "no file missing.py"),
        ("missing.pt2", "no file missing.pt2"),
        ("network.py", "is not of a known form"),
        ("no_such_package.models:make", "no module 'no_such_package': install it"),
        ("normscope.nothing:make", "no module 'normscope.nothing'"),
        ("broken.py:make", "running broken.py failed: ModuleNotFoundError"),
        ("broken:make", "importing broken failed: ModuleNotFoundError"),
        ("leaves.py:make", "running leaves.py failed: SystemExit"),
        ("network.py:mak", "has no 'mak': did you mean make?"),
        ("network.py:needs", "needs arguments (width): name a function that takes none"),
        ("network.py:fails", "failed: RuntimeError: no luck (network.py:12)"),
        ("network.py:number", "returned 3: it must return a torch.nn.Module"),
        ("network.py:text", "is 'a string': name a callable"),
        ("network.py.pt2", "no file network.py.pt2"),
    ],
)
def test_a_bad_model_is_one_line_that_says_what_to_do(place: Path, spec: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(spec)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_exported_program(place: Path) -> None:
    Path("junk.pt2").write_text("junk")
    with pytest.raises(InputError, match=r"junk\.pt2 is not an exported program"):
        load_model("junk.pt2")
    with pytest.raises(InputError, match="has its own weights"):
        load_model("junk.pt2", weights=Path("weights.pt"))


def test_seed_fixes_random_weights_and_global_state_stays(place: Path) -> None:
    before = torch.random.get_rng_state()
    for spec in ("network.py:make", "network.py:made"):
        weights = [load_model(spec, seed=seed).weight for seed in (0, 0, 1)]  # type: ignore[union-attr]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights.pth", "checkpoint.pt"])
def test_weights_are_loaded(place: Path, name: str) -> None:
    state = {"weight": torch.full((2, 3), 7.0), "bias": torch.full((2,), 5.0)}
    if name.endswith("safetensors"):
        save_file(state, name)
    else:
        torch.save({"state_dict": state, "epoch": 3} if name.startswith("checkpoint") else state, name)
    model = load_model("network.py:make", Path(name))
    assert isinstance(model, nn.Linear) and bool((model.weight == 7).all()) and bool((model.bias == 5).all())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_weights_of_a_wrapped_model_are_loaded(place: Path, prefix: str) -> None:
    torch.save({"model_state_dict": {f"{prefix}weight": torch.full((2, 3), 7.0), f"{prefix}bias": torch.zeros(2)}}, "wrapped.pt")
    model = load_model("network.py:make", Path("wrapped.pt"))
    assert isinstance(model, nn.Linear) and bool((model.weight == 7).all())


def test_a_tied_weight_is_saved_once(place: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = {key: value for key, value in model.state_dict().items() if key != "1.weight"}
    save_file(state, "tied.safetensors")
    load_weights(model, Path("tied.safetensors"))


def test_what_does_not_fit_is_listed(place: Path) -> None:
    model = mlp(8, 3, 4)
    state = {key: value for key, value in model.state_dict().items() if "weight" not in key}
    state["3.bias"] = torch.zeros(9)
    torch.save({**state, "extra": torch.zeros(1)}, "other.pt")
    with pytest.raises(InputError) as caught:
        load_weights(model, Path("other.pt"))
    message = str(caught.value)
    assert "3 missing (1.weight, 3.weight, 5.weight)" in message and "\n" not in message
    assert "1 unexpected (extra)" in message and "1 of another shape (3.bias 9 instead of 8)" in message


def test_weights_are_never_unpickled(place: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (Path("sprung"),)

    torch.save({"weight": Trap()}, "trap.pt")
    with pytest.raises(InputError, match=r"trap\.pt holds no plain state dict: save model\.state_dict\(\)"):
        load_weights(nn.Linear(3, 2), Path("trap.pt"))
    assert not Path("sprung").exists()


@pytest.mark.parametrize("name", ["junk.pt", "junk.safetensors", "junk.bin", "missing.pt", "list.pt"])
def test_a_bad_weights_file_is_one_line(place: Path, name: str) -> None:
    if name.startswith("junk"):
        Path(name).write_text("junk")
    torch.save([1, 2], "list.pt")
    with pytest.raises(InputError) as caught:
        load_weights(nn.Linear(3, 2), Path(name))
    assert name in str(caught.value) and "\n" not in str(caught.value)
