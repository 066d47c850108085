"""The report of an audit: the bracket in words, how it builds up, the ledger, what the doctor says, the certificate."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from normscope.ledger import layers_in_products
from normscope.report.audits import certificate_gap, depth_profile, model_graph
from normscope.report.html import Drawing, Page, number, section, titled, words
from normscope.report.markup import Child, Markup, element, table
from normscope.version import __version__

if TYPE_CHECKING:
    from normscope.auditing import Audit
    from normscope.core.gap_curve import GapCurve
    from normscope.findings.finding import Finding, Findings
    from normscope.ledger import LayerRow

SECTIONS = (
    ("summary", "Summary"), ("depth", "Figures"), ("ledger", "Ledger"), ("findings", "Findings"),
    ("certificate", "Certificate"), ("settings", "Settings and versions"),
)  # fmt: skip
MOST_NAMED = 3
MOST_SHARES = 20
DEPTH = (
    "The line above is proved: no two inputs are moved further apart up to this layer. The line below "
    "is what a pair of inputs shows. The bar on the right is the whole network, bounded as one, so that it may lie below the line."
)
GAP = "Both sides of the bracket against the radius of its region: the closer the lines, the more the certificate says."
GRAPH = "Layers in the order of computation; arcs are what skips some. Brown and large raises the bound, violet lowers it."
PRODUCTS = {
    "weights_spectral": "∏ ‖W‖, as operators", "weights_matrix": "∏ ‖W‖, reshaped to matrices", "weights_frobenius": "∏ ‖W‖_F",
    "normalizers_tight": "∏ gain, tight", "normalizers_paper": "∏ gain, paper", "normalizers_paper_affine": "∏ gain, paper with γ",
    "normalizers_layer": "∏ 1/σ, one σ per layer",
}  # fmt: skip


def audit_report(audit: Audit) -> str:
    """The report as HTML text."""
    findings, refused = _examined(audit)
    page = Page()
    body = [
        section("summary", "Summary", verdict(audit, findings)),
        section("depth", "Figures", [page.draw(drawing) for drawing in drawings(audit)]),
        section("ledger", "Ledger", ledger(audit)),
        section("findings", "Findings of the doctor", element("p", refused) if findings is None else findings_table(findings)),
        section("certificate", "Certificate", certificate(audit), _gap_table(audit)),
        section("settings", "Settings and versions", _settings(audit)),
    ]
    return page.render(f"Audit of {audit.model}", *body, sections=SECTIONS)


def _examined(audit: Audit) -> tuple[Findings | None, str]:
    try:
        return audit.findings, ""
    except InputError as error:
        return None, str(error)


# words ---------------------------------------------------------------------------------------------------------------


def verdict(audit: Audit, findings: Findings | None) -> Markup:
    """The bracket in a sentence, what is not fine, what to do, what makes the bound."""
    bracket, shared = audit.bracket, _by_share(audit)
    lines = audit.nearby_lines() or bracket.about_gap()
    nearby = ". ".join(lines[1:] if leads_with_local(audit) else lines).removesuffix(".")  # the headline has said the first
    serious = _by_rule([finding for finding in findings or () if finding.severity != "info"])
    wrong: list[Child] = [[element("code", rule), f" at {_places(alike)}: {alike[0].message}"] for rule, alike in serious.items()]
    if bracket.upper is None:
        wrong.insert(0, f"There is no upper bound: {bracket.reason}: {'; '.join(bracket.certificate.causes)}.")
    elif not bracket.upper.finite:
        wrong.insert(0, f"No finite bound holds for all inputs: {bracket.reason}. A region would help: pass region=.")
    elif audit.too_loose:
        wrong.insert(0, f"The upper bound over all inputs, {bracket.upper}, is {audit.too_loose}.")
    remedies = [bracket.certificate.advice] if bracket.upper is None and bracket.certificate.advice else []
    remedies += [f"{_places(alike)}: {alike[0].fix}" for alike in serious.values() if alike[0].fix]
    checked = 0 if findings is None or wrong else len(findings.checked)
    fine = [f"{checked} checks of the doctor found no error and nothing to warn of."] if checked else []
    return element(
        "article",
        element("p", headline(audit), class_="headline"),
        element("p", _reading(audit), class_="soft"),
        element("p", f"{nearby[0].upper()}{nearby[1:]}.") if nearby else None,
        element(
            "div",
            titled("What is not fine", wrong, "wrong"),
            titled("What to do", remedies, "todo"),
            titled("What makes the bound", [_named(row) for row in shared[:MOST_NAMED]], "apart"),
            titled("What the normalizers do", _normalizers(audit), "apart"),
            titled("What is fine", fine, "right"),
            class_="lists",
        ),
        class_=f"verdict{' bad' if wrong else ''}",
    )


def _by_rule(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(finding.rule, []).append(finding)
    return grouped


def _places(alike: Sequence[Finding]) -> str:
    first = alike[0].where or "the model"
    return first if len(alike) == 1 else f"{first} and {len(alike) - 1} more"


def _by_share(audit: Audit) -> list[LayerRow]:
    """Layers with a share of log(upper), the largest first."""
    return sorted((row for row in audit.layers if row.share_of_log_upper), key=lambda row: -(row.share_of_log_upper or 0))


def headline(audit: Audit) -> str:
    """The bracket, and the layer that adds most to its upper side."""
    bracket, shared = audit.bracket, _by_share(audit)
    most = f" Layer {shared[0].name} adds most to the upper bound." if shared else ""
    if bracket.upper is None:
        below = f"is at least {bracket.lower}" if bracket.lower else "has no lower bound"
        return f"The Lipschitz constant {below}; there is no upper bound: {bracket.reason}."
    if not bracket.upper.finite:
        return f"The Lipschitz constant is at least {bracket.lower}, and has no finite bound."
    if leads_with_local(audit):
        near, radius = audit.local, audit.local_radius or 0.0
        assert near is not None
        return (
            f"Within {radius:.3g} of the first input the Lipschitz constant lies between {near.lower} and {near.upper}; "
            f"over all inputs it is at least {bracket.lower}, and the upper bound is too loose to use.{most}"
        )
    return f"The Lipschitz constant lies between {bracket.lower} and {bracket.upper}.{most}"


def leads_with_local(audit: Audit) -> bool:
    """Whether the bracket around the first input says more than the one over all of them."""
    return bool(audit.too_loose) and audit.local is not None and audit.local.upper is not None


def _reading(audit: Audit) -> str:
    bracket = audit.bracket
    bounded = bracket.upper is not None and bracket.upper.finite
    above = f"Two outputs are at most {bracket.upper} times as far apart as their inputs (proved)" if bounded else ""
    below = f"some pair of outputs is {bracket.lower} times as far apart as its inputs (shown)" if bracket.lower or bounded else ""
    shapes = ", ".join("×".join(map(str, shape)) for shape in audit.inputs)
    said = "; ".join(filter(None, [above, below])) or "nothing could be proved or shown"
    return f"On inputs of shape {shapes}, in {audit.mode} mode: {said[0].lower()}{said[1:]}."


def _named(row: LayerRow) -> str:
    return f"{row.name} ({row.kind}): {100 * (row.share_of_log_upper or 0):z.1f} % of log(upper)"


def _normalizers(audit: Audit) -> list[Child]:
    """What the gains of all normalizers do to the layer-by-layer bound at the last layer."""
    last = audit.layers[-1] if audit.layers else None
    if last is None or last.upper_here is None or last.upper_without_gains is None:
        return []
    if not any(row.gain is not None for row in audit.layers):
        return ["There are none."]
    if not (last.upper_here.finite and last.upper_here and last.upper_without_gains):
        return []
    factor = last.upper_here.log10 - last.upper_without_gains.log10
    verb = "raise" if factor > 0 else "lower"
    effect = f"{verb} it by a factor of {Magnitude.from_log10(abs(factor))}" if abs(factor) > 0.01 else "leave it as it is"
    return [f"Composed layer by layer, their gains {effect}."]


# figures -------------------------------------------------------------------------------------------------------------


def drawings(audit: Audit) -> list[Drawing]:
    """How the bracket builds up, which layers make it, and how it widens with the radius."""
    made = [
        Drawing("How the Lipschitz bracket builds up with depth", depth_profile(audit), DEPTH, _depth_table(audit)),
        Drawing("Which layers make the bound", model_graph(audit), GRAPH, _share_table(audit)),
    ]
    if audit.curve is not None:
        made.append(
            Drawing("Certificate gap", certificate_gap(audit.curve), _curve_in_words(audit.curve), _curve_table(audit.curve))
        )
    return made


def _curve_in_words(curve: GapCurve) -> str:
    said = "; ".join(curve.lines())
    return f"{GAP} {said[0].upper()}{said[1:]}."


# tables --------------------------------------------------------------------------------------------------------------


def _depth_table(audit: Audit) -> Markup:
    rows = [[row.name, _size(row.separation), _size(row.upper_here), _size(row.upper_without_gains)] for row in audit.layers]
    rows.append(["whole network", str(audit.bracket.lower), _size(audit.bracket.upper), "–"])
    return table(
        ["layer", "at least", "at most", "without the normalizers' gains"], rows, "The bracket from the input to each layer"
    )


def _curve_table(curve: GapCurve) -> Markup:
    rows = [[f"{point.radius:.4g}", str(point.lower), _size(point.upper), str(point.ratio)] for point in curve.points]
    return table(["radius", "at least", "at most", "ratio"], rows, "Both sides at every radius that was tried")


def _gap_table(audit: Audit) -> Markup | None:
    """Where the gap of the bracket on a region comes from."""
    shown = audit.local if audit.local is not None else audit.bracket
    rows: list[list[Child]] = [
        [share.where or "–", share.operation, f"{share.units:,}" if share.units else "–", f"{100 * share.share:.1f} %"]
        for share in shown.gap[:MOST_SHARES]
    ]
    if not rows:
        return None
    about = f"Where the gap between {shown.lower} and {shown.upper} comes from"
    return table(["where", "operation", "units not straight", "share of the gap"], rows, about)


def _share_table(audit: Audit) -> Markup:
    rows = [[row.name, row.kind, _percent(row.share_of_log_upper), ", ".join(row.reads) or "the input"] for row in audit.layers]
    return table(["layer", "kind", "share of log(upper)", "reads"], rows, "Shares of log(upper), and what each layer reads")


def ledger(audit: Audit) -> list[Child]:
    """Every layer under every definition, and the products over layers."""
    rows = [
        [row.name, row.kind, *map(_size, (row.spectral_norm, row.frobenius_norm, row.gain, row.gain_paper, row.gain_layer)),
         number(row.input_std), _percent(row.share_of_log_upper)]
        for row in audit.layers
    ]  # fmt: skip
    head = ["layer", "kind", "‖W‖", "‖W‖_F", "gain, tight", "gain, paper", "1/σ", "σ of the input", "share of log(upper)"]
    return [table(head, rows, f"{len(rows)} layers; σ and gains on the {audit.statistics}"), _products(audit)]


def _products(audit: Audit) -> Markup:
    counts = layers_in_products(audit.layers)
    rows = [[PRODUCTS.get(name, name), number(value), str(counts[name])] for name, value in audit.products.items() if counts[name]]
    note = "; in a residual network no such product is a bound" if audit.residual else ""
    return table(["product over layers", "log10", "layers"], rows, f"Products{note}")


def findings_table(findings: Findings) -> list[Child]:
    """What the doctor found, and what it could not look at."""
    rows = [[f.rule, f.severity, f.where or "the model", words(f.message), words(f.fix)] for f in findings]
    found = table(["rule", "severity", "where", "what", "what to do"], rows, f"{len(rows)} findings")
    nothing = element("p", f"Nothing found by {len(findings.checked)} checks.")
    return [found if rows else nothing, titled("Not checked", findings.left_out, "notes")]


def certificate(audit: Audit) -> Markup:
    """Why the upper bound holds, or what it lacks."""
    if audit.bracket.upper is None:
        lacking = [[words(cause)] for cause in audit.bracket.certificate.causes]
        return table(["operation, module path and source line"], lacking, f"No upper bound: {audit.bracket.reason}")
    rows = [
        [step.path or step.name, step.operation, str(step.gain), words(step.method)] for step in audit.bracket.certificate.steps
    ]
    return table(["where", "operation", "at most ×", "by"], rows, "Why the upper bound holds, step by step")


def _settings(audit: Audit) -> Child:
    import torch

    shapes = ", ".join("×".join(map(str, shape)) for shape in audit.inputs)
    rows: list[list[Child]] = [
        ["model", audit.model], ["mode", audit.mode], ["inputs", shapes], ["statistics", f"of the {audit.statistics}"],
        ["normscope", __version__], ["torch", str(torch.__version__)], ["python", platform.python_version()],
    ]  # fmt: skip
    return [table(["setting", "value"], rows, "Settings"), titled("Notes", list(audit.notes), "notes")]


def _size(value: Magnitude | None) -> str:
    return "–" if value is None else str(value)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:z.1f} %"
