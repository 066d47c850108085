"""A .pt2 archive that is trusted is still inspected: whatever would run code as it is loaded or called is refused or dropped."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from normscope.cli.archive import GRAMMAR, inspected
from normscope.cli.models import load_model
from normscope.core.errors import InputError

MODEL, WEIGHTS = "archive/models/model.json", "archive/data/weights/model_weights_config.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"
CALL = "__import__('pathlib').Path('sprung').touch()"


class Trap:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


class Net(nn.Module):
    """Of everything that a program may hold: blocks, constants, guards, expressions, dictionaries, odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.shift = nn.ModuleDict({"a-b": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)}), torch.ones(4)

    def forward(self, input: Tensor, target: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            scale = target["t"] * self.shift
        y = self.parts["norm"](self.parts["a-b"](input))
        if y.shape[0] % 2 == 0:
            y = y.reshape(y.shape[0] // 2, 2, -1).flip(1).reshape(y.shape[0], -1)
        return {"the sum": y * scale * (y.shape[0] ** 2 / 4), "scale": scale}


def example() -> tuple[Tensor, dict[str, Tensor]]:
    return torch.ones(4, 3), {"t": torch.ones(4, 4)}


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """The files of an archive."""
    buffer = BytesIO()
    sizes = {0: Dim.AUTO}
    torch.export.save(torch.export.export(Net().eval(), example(), dynamic_shapes=(sizes, {"t": sizes})), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(files: dict[str, bytes], path: str = "model.pt2") -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def changed(files: dict[str, bytes], name: str, change: Callable[[Any], object]) -> dict[str, bytes]:
    content = json.loads(files[name])
    change(content)
    return {**files, name: json.dumps(content).encode()}


def run(path: str) -> Tensor:
    program = load_model(path, trust=True)
    assert isinstance(program, torch.export.ExportedProgram)
    return program.module()(*example())["the sum"]


def saved(value: object) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_what_is_loaded_is_the_program_without_its_samples(whole: dict[str, bytes], place: Path) -> None:
    path = write({**whole, "archive/data/sample_inputs/model.pt": saved((Trap(),)), "archive/extra/note": b"dropped"})
    expected = torch.export.load(BytesIO(Path(write(whole, "plain.pt2")).read_bytes()))
    program = load_model(path, trust=True)
    assert isinstance(program, torch.export.ExportedProgram) and not Path("sprung").exists()
    assert torch.equal(program.module()(*example())["the sum"], expected.module()(*example())["the sum"])
    assert program._guards_code == expected._guards_code and len(program._guards_code) > 0
    assert [node.meta.get("nn_module_stack") for node in program.graph.nodes] == [
        node.meta.get("nn_module_stack") for node in expected.graph.nodes
    ]


def node(content: Any) -> Any:
    return content["graph_module"]["graph"]["nodes"][1]


def use_pickle(content: Any) -> None:
    next(iter(content["config"].values()))["use_pickle"] = True


def opaque(content: Any) -> None:
    next(iter(content["config"].values())).update(path_name="opaque_obj_0", use_pickle=True)


def call(target: str, *words: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        inputs = [{"name": "", "arg": {"as_string": word}, "kind": 1} for word in words]
        node(content).update(target=target, inputs=inputs)

    return change


def structure(tree: dict[str, Any]) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        signature = content["graph_module"]["module_call_graph"][0]["signature"]
        signature["in_spec"] = json.dumps([1, tree])

    return change


TRAPS: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "a pickled weight": lambda files: changed({**files, "archive/data/weights/weight_0": saved(Trap())}, WEIGHTS, use_pickle),
    "an object": lambda files: changed({**files, "archive/data/constants/opaque_obj_0": pickle.dumps(Trap())}, CONSTANTS, opaque),
    "weights of older programs": lambda files: {**files, "archive/data/weights/model.pt": saved(Trap())},
    "constants of older programs": lambda files: {**files, "archive/data/constants/model.pt": saved(Trap())},
    "a compiled library": lambda files: {**files, "archive/data/aotinductor/model/model.so": b"\x7fELF"},
    "a guard": lambda files: changed(files, MODEL, lambda content: content.update(guards_code=[f"{CALL} is None"])),
    "a guard behind a guard": lambda files: changed(files, MODEL, lambda c: c["guards_code"].append(f"1 == 1, '') or {CALL}  #")),
    "a function of torch": lambda files: changed(files, MODEL, call("torch.hub.load", "somebody/repository", "model")),
    "a file that is written to": lambda files: changed(files, MODEL, call("torch.ops.aten.from_file.default", "sprung")),
    "a library": lambda files: changed(files, MODEL, call("torch.ops.load_library", "library.so")),
    "an attribute of a library": lambda files: changed(files, MODEL, call("torch.ops.aten.add.__class__", "library.so")),
    "an enumeration": lambda files: changed(
        files,
        MODEL,
        structure({"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "antigravity:x", "name": "a"}]', "children_spec": []}),
    ),
    "a factory": lambda files: changed(
        files, MODEL, structure({"type": "collections.defaultdict", "context": '{"default_factory_module": "os"}', "children_spec": []})
    ),
    "a number that fills the memory": lambda files: changed(
        files, MODEL, lambda content: content["guards_code"].append("Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9)))) > 0")
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_what_would_run_code_is_refused(trap: str, whole: dict[str, bytes], place: Path) -> None:
    path = write(TRAPS[trap](whole))
    with pytest.raises(InputError, match=r"model\.pt2 is not loaded, even with --trust") as caught:
        load_model(path, trust=True)
    assert "\n" not in str(caught.value) and not Path("sprung").exists()


def texts(content: Any, key: str = "") -> Iterator[tuple[str, Callable[[str], None]]]:
    """Every text of a JSON value with its field, and how to replace it."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, inner in entries:
        field = name if isinstance(name, str) else key
        if isinstance(inner, str):
            yield field, lambda text, name=name: content.__setitem__(name, text)
        else:
            yield from texts(inner, field)


PAYLOADS = (CALL, f"x=({CALL}), y", f'"), {CALL}) #', f"1\n    {CALL}", "Integer(__import__('os').mkdir('sprung'))")


def test_no_text_anywhere_is_run(whole: dict[str, bytes], place: Path) -> None:
    """Each kind of field is given code in its stead, once as text and once inside an object or a list."""
    content = json.loads(whole[MODEL])
    fields = {field: index for index, (field, _) in enumerate(texts(content))}
    assert GRAMMAR.keys() - {"as_operator", "custom_obj_name", "user_input_name"} <= fields.keys()
    for field, index in fields.items():
        for payload in (*PAYLOADS, [CALL], {CALL: CALL}):
            content = json.loads(whole[MODEL])
            [*texts(content)][index][1](payload)  # type: ignore[arg-type]
            path = write({**whole, MODEL: json.dumps(content).encode()})
            try:
                run(path)
            except InputError as error:
                assert "\n" not in str(error)
            except Exception:  # a program that torch loaded and cannot run
                assert field not in GRAMMAR
            assert not Path("sprung").exists(), (field, payload)


@pytest.mark.parametrize("damage", ["twice", "compressed", "folders", "json", "short"])
def test_archives_that_torch_does_not_write_are_refused(damage: str, whole: dict[str, bytes], place: Path) -> None:
    with zipfile.ZipFile("model.pt2", "w", zipfile.ZIP_DEFLATED if damage == "compressed" else zipfile.ZIP_STORED) as archive:
        for name, content in whole.items():
            archive.writestr(name, b"{" if damage == "json" and name == MODEL else content)
        if damage == "twice":
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(MODEL, whole[MODEL])
        if damage == "folders":
            archive.writestr("other/models/model.json", whole[MODEL])
    if damage == "short":
        Path("model.pt2").write_bytes(Path("model.pt2").read_bytes()[:-100])
    with pytest.raises(InputError, match="export the model again"):
        inspected(Path("model.pt2"))
