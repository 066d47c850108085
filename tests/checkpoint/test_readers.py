"""Every format gives the same tensors, exactly; a damaged file is an error of one line, whatever is damaged."""

from __future__ import annotations

import json
import random
import resource
import struct
import tracemalloc
import zipfile

import pytest
import torch

from normscope._checkpoint.entries import content_hash, rows
from normscope._checkpoint.opening import open_checkpoint
from normscope.core.errors import InputError
from tests.checkpoint.files import gguf_bytes, write

FORMATS = ("safetensors", "shards", "pt", "gguf")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 7), "a.bias": (5,), "norm.weight": (7,), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_formats_agree(tmp_path, format, dtype):
    expected = state(dtype)
    found = open_checkpoint(write(tmp_path, format, expected))
    assert found.entries.keys() == expected.keys()
    for name, entry in found.entries.items():
        assert torch.equal(entry.tensor(), expected[name]) and entry.shape == expected[name].shape
        assert entry.nbytes == expected[name].numel() * expected[name].element_size()
        if entry.nbytes:
            assert torch.equal(torch.cat(list(rows(entry.tensor()))).flatten(), expected[name].double().flatten())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_exact(tmp_path, dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, 128)
    found = open_checkpoint(write(tmp_path, "safetensors", {"w": every})).entries["w"].tensor()
    assert torch.equal(found.double().nan_to_num(7, 8, 9), every.float().double().nan_to_num(7, 8, 9))


def test_quantized_blocks_are_those_of_the_reference(tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install 'normscope[gguf]'")
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(values, kind)
    writer.add_tensor("w", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = open_checkpoint(tmp_path / "q.gguf").entries["w"]
    assert entry.dtype == "Q8_0" and entry.shape == (4, 64)
    assert torch.equal(entry.tensor(), torch.from_numpy(gguf.quants.dequantize(packed, kind)))


def test_wrapped_names_and_nested_states(tmp_path):
    torch.save({"epoch": 3, "state_dict": {f"module._orig_mod.{k}": v for k, v in state().items()}}, tmp_path / "c.pt")
    assert open_checkpoint(tmp_path / "c.pt").entries.keys() == state().keys()


def test_hash_is_of_the_content():
    one = torch.ones(3, 2)
    assert content_hash(one) == content_hash(one.clone()) != content_hash(one.reshape(2, 3))
    assert content_hash(one.T) == content_hash(torch.ones(2, 3)) and content_hash(one) != content_hash(one.half())


# damage ----------------------------------------------------------------------------------------------------------------------


def header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "nothing": b"",
    "only a length": struct.pack("<Q", 1 << 60),
    "huge header": struct.pack("<Q", 99_000_000) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"{a:1",
    "a list": struct.pack("<Q", 2) + b"[]",
    "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "twice": struct.pack("<Q", 12) + b'{"a":1,"a":2' + b"}",
    "truncated": header(a=F32) + b"1234",
    "overlapping": header(a=F32, b={**F32, "data_offsets": [4, 12]}) + b"0" * 12,
    "a hole": header(a=F32, b={**F32, "data_offsets": [12, 20]}) + b"0" * 20,
    "a rest": header(a=F32) + b"0" * 9,
    "shape lies": header(a={**F32, "shape": [3]}) + b"0" * 8,
    "negative": header(a={**F32, "shape": [-2]}) + b"0" * 8,
    "boolean": header(a={**F32, "shape": [True, 2]}) + b"0" * 8,
    "overflow": header(a={**F32, "shape": [1 << 61, 1 << 61]}) + b"0" * 8,
    "backwards": header(a={**F32, "data_offsets": [8, 0]}) + b"0" * 8,
    "unknown type": header(a={**F32, "dtype": "X9"}) + b"0" * 8,
    "type of a list": header(a={**F32, "dtype": ["F32"]}) + b"0" * 8,
    "a field more": header(a={**F32, "code": 1}) + b"0" * 8,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_headers_are_errors(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_header_of_brackets_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "m.safetensors"
    text = b'{"a":[' + b"[]," * 3_000_000 + b"[]]}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    tracemalloc.start()
    with pytest.raises(InputError, match="nested"):
        open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    tracemalloc.stop()


INDICES = {
    "elsewhere": {"weight_map": {"a": "../secret.safetensors"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "missing": {"weight_map": {"a": "gone.safetensors"}},
    "no map": {"metadata": {}},
    "numbers": {"weight_map": {"a": 3}},
}


@pytest.mark.parametrize("content", INDICES.values(), ids=INDICES)
def test_indices_that_lie(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(InputError):
        open_checkpoint(tmp_path)


def test_an_index_must_agree_with_its_shards(tmp_path):
    folder = write(tmp_path, "shards", state())
    path = folder / "model.safetensors.index.json"
    listed = json.loads(path.read_text())
    for change in ({"ghost": "model-00001-of-00002.safetensors"}, {"a.bias": "model-00002-of-00002.safetensors"}):
        path.write_text(json.dumps({"weight_map": {**listed["weight_map"], **change}}))
        with pytest.raises(InputError, match="but it is not there"):
            open_checkpoint(folder)
    path.write_text(json.dumps({"weight_map": {k: v for k, v in listed["weight_map"].items() if k != "a.bias"}}))
    with pytest.raises(InputError, match="does not list"):
        open_checkpoint(folder)


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_pickles_are_never_run(tmp_path, capsys):
    torch.save({"a": Code()}, tmp_path / "m.pt")
    with pytest.raises(InputError, match="no plain state dict"):
        open_checkpoint(tmp_path / "m.pt")
    assert "run" not in capsys.readouterr().out


def test_compressed_and_expanded_pickles_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as old, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(InputError, match="compressed"):
        open_checkpoint(tmp_path / "z.pt")
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "e.pt")
    with pytest.raises(InputError, match="larger than the data stored"):
        open_checkpoint(tmp_path / "e.pt")


WORDS = (b"F32", b"BF16", b"F4", b"[4,3]", b"[-1]", b"[9999999999]", b"[1e3]", b"null", b"{", b"}", b"[", b"\xff", b'"', b"__metadata__", b"\0" * 9, b"\xff" * 8)  # fmt: skip


def mutated(content: bytes, choice: random.Random, head: int) -> bytes:
    """One to four of: a byte changed, a number of eight bytes put in, a word put in, a part cut out, the end cut off."""
    made = bytearray(content)
    for _ in range(choice.randint(1, 4)):
        place = choice.randrange(min(head, len(made)) or 1)
        kind = choice.randrange(5)
        if kind == 0 and made:
            made[place] = choice.randrange(256)
        elif kind == 1:
            made[place : place + 8] = struct.pack("<Q", choice.choice((0, 1, 8, 255, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1)))
        elif kind == 2:
            made[place:place] = choice.choice(WORDS)
        elif kind == 3:
            del made[place : place + choice.randrange(1, 40)]
        else:
            del made[choice.randrange(len(made) or 1) :]
    return bytes(made)


def survive(path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = open_checkpoint(path)
        for entry in found.entries.values():
            entry.tensor()
    except InputError as error:
        assert "\n" not in str(error)


def fuzz(tmp_path, cases: range) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = tmp_path / "good"
    originals = {
        "m.safetensors": (write(folder, "safetensors", state()).read_bytes(), 300),
        "m.gguf": (gguf_bytes(state(), {"general.architecture": "llama", "tokens": ["a", "bc"] * 20, "n": 3}), 700),
        "model.safetensors.index.json": ((write(folder / "s", "shards", state()) / "model.safetensors.index.json").read_bytes(), 300),
        "m.pt": (write(folder, "pt", state()).read_bytes(), 2500),
    }  # fmt: skip
    for seed in cases:
        choice = random.Random(seed)
        name = choice.choices(list(originals), (5, 5, 1, 1))[0]
        survive(tmp_path / name, mutated(originals[name][0], choice, originals[name][1]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown} KiB more than before, for files of a few KiB"


def test_damaged_files_never_crash(tmp_path):
    fuzz(tmp_path, range(1_000))


@pytest.mark.full
def test_ten_thousand_damaged_files_never_crash(tmp_path):
    fuzz(tmp_path, range(10_000))


def test_parameters_that_require_gradients_are_read(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(keep_vars=True), tmp_path / "m.pt")
    assert all(not entry.tensor().requires_grad for entry in open_checkpoint(tmp_path / "m.pt").entries.values())
