"""What may reach `torch.export.load`: an archive written anew from numbers, names, operations of torch and arithmetic on sizes.

`torch.export.load` unpickles sample inputs, weights and constants, loads compiled libraries, has sympy evaluate expressions, pastes
guards into Python source, imports modules that an input's structure names, and looks up whatever function of torch a node names.
So every file of the archive is known or dropped, every pickle refused or dropped, and every text that would be evaluated is held
against a grammar. What is loaded is the copy that was inspected: no second reading of the file can find something else.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from normscope.core.errors import InputError

KEPT = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/model\.json"
    r"|data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)"
)
SAMPLES = "data/sample_inputs/model.pt"  # torch reads it, and takes an empty one for none
METADATA = ("stack_trace", "nn_module_stack", "torch_fn")  # of a node: where it comes from, as text
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
BLOCKS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")  # of nodes: all that a trace can read
ON_SIZES = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|neg|pos|pow|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)|math\.(ceil|floor|trunc|sqrt)"
    r"|torch\.sym_(int|float|max|min|not|ite|sum)|torch\._sym_sqrt"
)
FUNCTIONS = frozenset(
    (
        "Integer", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Abs", "And", "Or", "Not", "Eq", "Ne", "Equality", "Unequality",
        "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan", "FloorDiv", "ModularIndexing", "Where", "PythonMod",
        "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv",
        "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat",
        "Identity",
    )
)  # fmt: skip
GROWING = frozenset(("Pow", "PowByNatural", "FloatPow", "LShift"))  # a few of them, nested, make numbers that fill a memory
NAMED = frozenset(  # fields whose keys are names of the model's own
    (
        "tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values", "as_string_to_argument",
        "config", "range_constraints", "opset_version",
    )
)  # fmt: skip
LONGEST = 50_000  # characters of one expression


def inspected(path: Path) -> BytesIO:
    """The exported program in `path` without its sample inputs, once nothing in it can run code; else an InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = _files(archive, path.stat().st_size)
        for name in list(files):
            if name.endswith(".json"):
                content = json.loads(files[name])
                _check(content)
                files[name] = json.dumps(content).encode()
        return _written(files)
    except (InputError, OSError):
        raise
    except Exception as error:  # of zip, text and JSON, which damage of any kind may cause
        raise InputError(f"not an archive of torch.export.save ({type(error).__name__}): export the model again") from error


def _files(archive: zipfile.ZipFile, size: int) -> dict[str, bytes]:
    """Contents by name inside the one folder of the archive, without what is never read."""
    entries = archive.infolist()
    names = [entry.filename.partition("/")[2] for entry in entries]
    if len({entry.filename.partition("/")[0] for entry in entries}) != 1 or len(set(names)) < len(names):
        raise InputError("not an archive of torch.export.save, which has one folder and each file once: export the model again")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(entry.file_size for entry in entries) > size:
        raise InputError("its files are compressed, or more than the archive holds: export the model again")
    for name in names:
        if name.startswith("data/aotinductor/"):
            raise InputError("it holds compiled code: export the model without compiling it")
        if re.fullmatch(r"data/(weights|constants)/.*(\.pt|_obj.*)", name):
            raise InputError(
                f"it holds a pickle ({name}): export the model again with this version of torch, with plain tensors only"
            )
    kept = {name: archive.read(entry) for name, entry in zip(names, entries, strict=True) if KEPT.fullmatch(name)}
    if "models/model.json" not in kept:
        raise InputError("it holds no program: export the model again")
    return {**kept, SAMPLES: b""}


def _written(files: dict[str, bytes]) -> BytesIO:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)
    buffer.seek(0)
    return buffer


def _check(content: Any, key: str = "") -> None:
    """Every text at any depth, by the field in which it stands; metadata that is not needed is removed."""
    if isinstance(content, dict):
        _demand(key, key not in GRAMMAR, "is not text")
        if isinstance(content.get("metadata"), dict):
            content["metadata"] = {name: content["metadata"][name] for name in METADATA if name in content["metadata"]}
        for name, inner in content.items():
            if key in NAMED:
                _demand(name, _is_plain(name), "is not a plain name")
            _check(inner, "" if key in NAMED else name)
    elif isinstance(content, list):
        for inner in content:
            _check(inner, key)
    elif key == "use_pickle":
        _demand("a weight", content is False, "is a pickle")
    elif isinstance(content, str) and key in GRAMMAR:
        allowed, otherwise = GRAMMAR[key]
        _demand(content, allowed(content), otherwise)


def _demand(text: str, allowed: bool, otherwise: str) -> None:
    if not allowed:
        shown = text if len(text) <= 60 else text[:57] + "…"
        raise InputError(f"it holds {shown!r}, which {otherwise}: name the callable that makes the model instead")


def _is_name(text: str) -> bool:
    return not text or (text.isidentifier() and not keyword.iskeyword(text))


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set(text) & set("\"'\\{}")


def _is_operation(text: str) -> bool:
    if ON_SIZES.fullmatch(text):
        return True
    found = re.fullmatch(r"torch\.ops\.(aten|prims|higher_order)\.(\w+)(?:\.(\w+))?", text)
    if found is None:
        return False
    space, name, overload = found.groups()
    operation = getattr(getattr(torch.ops, space), name, None)
    if space == "higher_order":
        return isinstance(operation, HigherOrderOperator) and name in BLOCKS and overload is None
    if not isinstance(operation, OpOverloadPacket) or overload is None or name == "from_file":
        return False
    return isinstance(getattr(operation, overload, None), OpOverload)


def _is_input(text: str) -> bool:
    """Plain containers, and dictionaries with names as keys, since torch writes those into source code."""
    return _is_tree(json.loads(text)[1], _is_name)


def _is_output(text: str) -> bool:
    return _is_tree(json.loads(text)[1], _is_plain)


def _is_tree(tree: Any, is_key: Callable[[str], bool]) -> bool:
    keys = json.loads(tree["context"] or "null")
    return (
        tree["type"] in CONTAINERS
        and (keys is None or isinstance(keys, list))
        and all(is_key(key) if isinstance(key, str) else type(key) in (int, float, bool) for key in keys or ())
        and all(_is_tree(child, is_key) for child in tree["children_spec"])
    )


def _is_arithmetic(text: str) -> bool:
    """Sums, products, comparisons and the functions above, of numbers, symbols and sizes of inputs (`L['x'].size()[0]`)."""
    if len(text) > LONGEST or not text.isprintable() or "#" in text:
        return False
    try:
        return _evaluates(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _evaluates(node: ast.expr, grown: int) -> bool:
    match node:
        case ast.Constant(value):
            return isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**64)
        case ast.Name(id=name):
            return re.fullmatch(r"[a-z]+\d+|oo|int_oo|true|false|inf", name) is not None
        case ast.UnaryOp(operand=operand):
            return _evaluates(operand, grown)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right):
            return _evaluates(left, grown) and _evaluates(right, grown)
        case ast.BinOp(left, ast.Pow(), right):
            return _grows(left, right, grown)
        case ast.BoolOp(values=values):
            return all(_evaluates(value, grown) for value in values)
        case ast.Compare(left, _, comparators):
            return all(_evaluates(value, grown) for value in (left, *comparators))
        case ast.Subscript(ast.Call(ast.Attribute(place, "size" | "stride"), [], []), ast.Constant(int())):
            return _is_place(place)
        case ast.Call(ast.Attribute(place, "storage_offset"), [], []):
            return _is_place(place)
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str(name))], keywords):
            return _is_name(name) and bool(name) and all(_is_flag(word) for word in keywords)
        case ast.Call(ast.Name("Float"), [ast.Constant(str(number))], keywords):
            return re.fullmatch(r"-?[\d.]{1,40}(e[+-]?\d{1,3})?", number) is not None and all(_is_flag(word) for word in keywords)
        case ast.Call(ast.Name(name), [left, right], []) if name in GROWING:
            return _grows(left, right, grown)
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS - GROWING:
            return all(_evaluates(argument, grown) for argument in arguments)
    return False


def _grows(base: ast.expr, exponent: ast.expr, grown: int) -> bool:
    small = re.fullmatch(r"(Integer\()?-?\d{1,2}\)?", ast.unparse(exponent)) is not None
    return small and grown < 2 and _evaluates(base, grown + 1)


def _is_flag(word: ast.keyword) -> bool:
    return isinstance(word.value, ast.Constant) and isinstance(word.value.value, bool | int)


def _is_place(node: ast.expr) -> bool:
    """An input: `L['x']`, and parts of it."""
    match node:
        case ast.Name("L"):
            return True
        case ast.Subscript(inner, ast.Constant(int())):
            return _is_place(inner)
        case ast.Subscript(inner, ast.Constant(str(name))):
            return _is_name(name) and _is_place(inner)
    return False


_NAME = (_is_name, "is not the name of a variable")
_PLAIN = (_is_plain, "is not a plain name")
_SIZES = (_is_arithmetic, "is more than arithmetic on sizes")
_OPERATION = (_is_operation, "is not an operation of torch.ops.aten")
_STRUCTURE = "is not a structure of tuples, lists and dictionaries with plain names"
GRAMMAR: dict[str, tuple[Callable[[str], bool], str]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _NAME),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "user_input_name", "fqn"), _PLAIN),
    **dict.fromkeys(("expr_str", "guards_code"), _SIZES),
    **dict.fromkeys(("target", "as_operator"), _OPERATION),
    "in_spec": (_is_input, _STRUCTURE),
    "out_spec": (_is_output, _STRUCTURE),
}
