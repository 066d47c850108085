"""MODEL and --weights: every form is found, and everything that can be wrong with them is one line that says what to do."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normscope.cli.models import load_model, load_module
from normscope.cli.weights import load_weights
from normscope.core.errors import InputError
from normscope.lab.models import mlp
from tests.cli.commands import normscope

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
    assert isinstance(load_model("linear.pt2", trust=True), torch.export.ExportedProgram)


class Trap:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def set_trap(path: str) -> None:
    """An exported program whose sample inputs are a trap."""
    whole, trap = BytesIO(), BytesIO()
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),)), whole)
    torch.save((Trap(),), trap)
    with zipfile.ZipFile(whole) as given, zipfile.ZipFile(path, "w") as made:
        for name in given.namelist():
            made.writestr(name, trap.getvalue() if "sample_inputs" in name else given.read(name))


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "trap.pt2", "--input", "3"),
        ("doctor", "trap.pt2", "--input", "3"),
        ("curvature", "trap.pt2", "--data", "digits"),
        ("generalization", "trap.pt2", "--train", "digits"),
    ],
)
def test_an_exported_program_runs_no_code_unless_it_is_trusted(place: Path, words: tuple[str, ...]) -> None:
    set_trap("trap.pt2")
    result = normscope(*words)
    assert result.exit_code == 2 and "trap.pt2" in result.stderr and result.stderr.count("\n") == 1
    assert not Path("sprung").exists()
    with pytest.raises(InputError, match="exported program"):
        load_module("trap.pt2")
    assert not Path("sprung").exists()


def test_trust_is_said_aloud(place: Path) -> None:
    set_trap("trap.pt2")
    assert "add --trust" in normscope("audit", "trap.pt2", "--input", "3").stderr
    result = normscope("audit", "trap.pt2", "--input", "3", "--trust")
    assert "warning: trap.pt2 is loaded as code" in " ".join(result.stderr.split())
    assert result.exit_code == 0 and not Path("sprung").exists()  # its sample inputs are never unpickled


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
    with pytest.raises(InputError, match=r"junk\.pt2 is not loaded, even with --trust: not an archive of torch\.export\.save"):
        load_model("junk.pt2", trust=True)
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


class Held(nn.Module):
    """A weight, and views of it, on a device of choice."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, device=device))
        self.register_buffer("same", self.weight.detach())
        self.register_buffer("head", self.weight.detach()[:2])
        self.register_buffer("turned", self.weight.detach().as_strided((2, 3), (1, 4)))


@pytest.mark.parametrize("given", ["head", "turned"])
def test_a_part_of_a_weight_is_not_the_weight(place: Path, given: str) -> None:
    """Also where both begin at the same address: the rest would keep what it was initialized with."""
    torch.save({given: torch.ones_like(Held().state_dict()[given])}, "part.pt")
    with pytest.raises(InputError, match=r"3 missing \(weight, same, "):
        load_weights(Held(), Path("part.pt"))


def test_without_memory_no_weight_is_another(place: Path) -> None:
    torch.save({"same": torch.ones(4, 3)}, "same.pt")
    with pytest.raises(InputError, match=r"3 missing \(weight, head, turned\)"):
        load_weights(Held("meta"), Path("same.pt"))


class Viewed(nn.Module):
    """Parameters, and views of them that a file need not hold."""

    def __init__(self, views: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(12))
        for name, value in views(self.flat.data).items():
            self.register_buffer(name, value)


VIEWS = {
    "a slice": lambda flat: {"v": flat[:2]},
    "a matrix": lambda flat: {"v": flat.view(3, 4)},
    "its transpose": lambda flat: {"v": flat.view(3, 4).t()},
    "every other entry": lambda flat: {"v": flat[1::2]},
    "expanded": lambda flat: {"v": flat[:3].expand(2, 3)},
    "bytes": lambda flat: {"v": flat.view(torch.uint8)},
    "a number": lambda flat: {"v": flat[5]},
    "nothing": lambda flat: {"v": flat[:0]},
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_weight_need_not_be_saved(place: Path, name: str) -> None:
    given, model = Viewed(VIEWS[name]), Viewed(VIEWS[name])
    save_file({"flat": given.flat.data}, "flat.safetensors")
    load_weights(model, Path("flat.safetensors"))
    assert torch.equal(model.v, given.v)


def test_parts_of_a_weight_fill_it_only_together(place: Path) -> None:
    def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"low": flat[:5], "high": flat[5:]}

    given, model = Viewed(views), Viewed(views)
    save_file({"low": given.low}, "low.safetensors")
    with pytest.raises(InputError, match=r"2 missing \(flat, high\)"):
        load_weights(model, Path("low.safetensors"))
    save_file({"low": given.low.clone(), "high": given.high.clone()}, "both.safetensors")
    load_weights(model, Path("both.safetensors"))
    assert torch.equal(model.flat, given.flat)


def test_a_tied_weight_is_saved_once(place: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = {key: value for key, value in model.state_dict().items() if key != "1.weight"}
    save_file(state, "tied.safetensors")
    load_weights(model, Path("tied.safetensors"))


@pytest.mark.parametrize("other", [torch.zeros(12), torch.full((12,), math.nan)])
def test_different_numbers_for_the_same_memory_are_refused(place: Path, other: torch.Tensor) -> None:
    """Those that come last would overwrite the others."""
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    torch.save({**nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict()}, "untied.pt")
    with pytest.raises(InputError, match=r"different numbers for 0\.weight and for what shares its memory"):
        load_weights(tied, Path("untied.pt"))
    viewed = Viewed(VIEWS["a matrix"])
    torch.save({"flat": torch.ones(12), "v": other.view(3, 4)}, "viewed.pt")
    with pytest.raises(InputError, match="flat"):
        load_weights(viewed, Path("viewed.pt"))
    torch.save({"v": other.view(3, 4)}, "buffer.pt")
    load_weights(viewed, Path("buffer.pt"))


class Whole(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(2, dtype=kind))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (torch.int32, torch.tensor([2**40, 1])), (torch.uint8, torch.tensor([300, 1])), (torch.bool, torch.tensor([2, 0])),
        (torch.uint64, torch.tensor([-1, 0])), (torch.int64, torch.tensor([2**64 - 1, 0], dtype=torch.uint64)),
        (torch.float32, torch.tensor([1e300, 0], dtype=torch.float64)), (torch.float16, torch.tensor([1e5, 0])),
    ],
)  # fmt: skip
def test_numbers_that_the_model_cannot_hold_are_refused(place: Path, kind: torch.dtype, given: torch.Tensor) -> None:
    torch.save({"n": given}, "large.pt")
    with pytest.raises(InputError, match=f"n holds numbers that the model's {str(kind)[6:]} cannot hold"):
        load_weights(Whole(kind), Path("large.pt"))


@pytest.mark.parametrize(
    "given", [torch.tensor([2**62 + 1, -(2**63)]), torch.tensor([True, False]), torch.tensor([255, 0], dtype=torch.uint8)]
)
def test_whole_numbers_are_loaded_to_the_last_digit(place: Path, given: torch.Tensor) -> None:
    torch.save({"n": given}, "whole.pt")
    model = Whole(torch.int64)
    load_weights(model, Path("whole.pt"))
    assert model.n.tolist() == given.tolist()


def test_a_lazy_model_is_refused_in_one_line(place: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), "linear.pt")
    with pytest.raises(InputError, match=r"weight, bias of the model has no shape yet \(lazy\)"):
        load_weights(nn.LazyLinear(2), Path("linear.pt"))


def test_complex_weights_are_numbers(place: Path) -> None:
    torch.save({"weight": torch.full((2, 3), complex(0, math.nan)), "bias": torch.zeros(2, dtype=torch.complex64)}, "complex.pt")
    with pytest.raises(InputError, match=r"weight is not a number \(NaN\) in places"):
        load_weights(nn.Linear(3, 2, dtype=torch.complex64), Path("complex.pt"))


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


WEIGHT, BIAS = torch.ones(2, 3), torch.ones(2)
UNUSABLE = {
    "numbers for names": ({3: WEIGHT, "bias": BIAS}, "its keys are names, not 3"),
    "tuples for names": ({("weight",): WEIGHT}, "its keys are names"),
    "nested": ({"weight": {"values": WEIGHT}, "bias": BIAS}, "weight dict instead of 2×3"),
    "complex": ({"weight": WEIGHT * 1j, "bias": BIAS}, "weight is complex instead of real"),
    "whole": ({"weight": WEIGHT.to(torch.int8), "bias": BIAS}, "weight is whole numbers instead of real"),
    "sparse": ({"weight": WEIGHT.to_sparse(), "bias": BIAS}, "weight is sparse or nested (sparse_coo)"),
    "rows": ({"weight": WEIGHT.to_sparse_csr(), "bias": BIAS}, "weight is sparse or nested (sparse_csr)"),
    "meta": ({"weight": torch.empty(2, 3, device="meta"), "bias": BIAS}, "weight has a shape but no values"),
    "quantized": ({"weight": torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8), "bias": BIAS}, "weight is quantized"),
    "NaN": ({"weight": WEIGHT / 0 * 0, "bias": BIAS}, "weight is not a number (NaN)"),
    "a number": ({"weight": 3, "bias": BIAS}, "weight int instead of 2×3"),
}  # fmt: skip
if hasattr(torch, "float4_e2m1fn_x2"):  # of PyTorch 2.8 and later
    PACKED = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    UNUSABLE["packed"] = ({"weight": PACKED, "bias": BIAS}, "weight is float4_e2m1fn_x2")


@pytest.mark.parametrize("case", UNUSABLE)
def test_weights_that_no_model_has_are_refused(place: Path, case: str) -> None:
    state, words = UNUSABLE[case]
    torch.save(state, "odd.pt")
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(InputError) as caught:
        load_weights(model, Path("odd.pt"))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert torch.equal(model.weight, before)
