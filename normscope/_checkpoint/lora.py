"""Low-rank updates beside a weight in one checkpoint, merged into it in the other: W + s B A."""

from __future__ import annotations

import re

from normscope._checkpoint.equality import apart
from normscope._checkpoint.hypotheses import Inquiry
from normscope._checkpoint.opening import Checkpoint
from normscope._checkpoint.views import Views
from normscope.core.rounding import gamma

FACTOR = re.compile(r"^(.*)\.lora_A(?:\.\w+)?\.weight$")


def merged_lora(found: Inquiry) -> None:
    """W_B = W_A + s B A wherever factors stand beside W_A, with one s for all layers, as lora_alpha / r is."""
    for letter, opened, views, against in (("A", found.a, found.one, found.other), ("B", found.b, found.other, found.one)):
        scales, known = [], []
        explained = {}
        for name in list(views):
            match = FACTOR.match(name)
            if match is None:
                continue
            merged, base = f"{match[1]}.weight", _base(match[1], views)
            up = name.replace("lora_A", "lora_B")
            if merged not in against or base is None or up not in views:
                return
            weight, target = views[base], against[merged]
            if any(len(views[factor].shape) != 2 for factor in (name, up)) or views[up].shape[1] != views[name].shape[0]:
                return  # of a convolution
            if any(view.kind.is_complex for view in (weight, target, views[up], views[name])):
                return
            product = views[up].value() @ views[name].value()
            step = target.value() - weight.value()
            if step.shape != product.shape or not bool(product.any()):
                return
            largest = product.abs().max()
            unit = product / largest
            scale = float((step / largest * unit).sum() / unit.square().sum())
            made = weight.value() + scale * product
            u = max(target.roundoff, weight.roundoff)
            allowed = 1.01 * (
                u * made.abs() + (u + gamma(product.shape[0])) * (views[up].value().abs() @ views[name].value().abs()) * abs(scale)
            )
            if not bool(((made - target.value()).abs() <= allowed).all()):
                return
            scales.append(scale)
            known.append(_declared(opened, match[1]))
            explained[merged] = (apart(made, target.value()), [base, name, up])
        if scales and max(scales) - min(scales) <= 1e-2 * abs(scales[0]):
            for merged, (defect, parts) in explained.items():
                for part in (merged, *parts):
                    found.accept(part, "the low-rank update is merged", defect)
            found.said.append(f"the low-rank updates of {len(scales)} weights in {letter} are merged with scale {scales[0]:.4g}")
            stated = [value for value in known if value is not None]
            wrong = next((value for value in stated if abs(value - scales[0]) > 1e-2 * abs(scales[0])), None)
            if wrong is not None:
                said = f"is merged with scale {scales[0]:.4g}, but {letter} reads its low-rank update with {wrong:.4g}"
                for merged in explained:
                    found.contradict(merged, said)
            elif len(stated) < len(known):
                found.unsaid.append(f"{letter} is read with lora_alpha / r = {scales[0]:.4g}, which no configuration confirms")
            return


def _declared(opened: Checkpoint, path: str) -> float | None:
    """lora_alpha / r of a layer, where the module itself is at hand and has one adapter."""
    try:
        scaling = getattr(opened.module and opened.module.get_submodule(path), "scaling", None)
    except AttributeError:
        return None
    values = list(scaling.values()) if isinstance(scaling, dict) else []
    return float(values[0]) if len(values) == 1 and isinstance(values[0], (int, float)) else None


def _base(module: str, views: Views) -> str | None:
    return next((name for name in (f"{module}.base_layer.weight", f"{module}.weight") if name in views), None)
