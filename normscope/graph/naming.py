"""How the nodes of an exported program are called in messages: operation, module path, source line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node as FxNode


def operation_name(target: Any) -> str:
    """`torch.ops.aten.relu_.default` → "relu"; operations of other libraries keep their namespace: "mylib.op"."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target.namespace, target._schema.name.split("::")[1]
    elif isinstance(target, torch._ops.OpOverloadPacket):
        namespace, name = target._qualified_op_name.split("::")
    else:
        return str(getattr(target, "__name__", None) or getattr(target, "_name", target))
    if name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}.{name}"


def module_path(fx: FxNode) -> str:
    stack = fx.meta.get("nn_module_stack")
    return re.sub(r"@\d+$", "", list(stack.values())[-1][0]) if stack else ""


def source_line(fx: FxNode) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', fx.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/nn/" not in file.replace("\\", "/")]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def label(fx: FxNode) -> str:
    """As a message names it."""
    line = source_line(fx)
    return f"{operation_name(fx.target)} at {module_path(fx) or 'the top level'}" + (f" ({line})" if line else "")


def is_view(target: Any) -> bool:
    """Whether an operation returns its argument's own memory."""
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)
