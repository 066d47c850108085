"""Names of layers are shown, never obeyed: by terminals, notebooks, pages, code scanning and logs of CI servers."""

from __future__ import annotations

import html
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import normscope as ns
from normscope.core.rendering import Table, Text
from normscope.core.text import COMMANDS, annotation, encodable, inert, sarif_message, uri, visible
from normscope.findings.finding import Finding, Findings
from normscope.findings.sarif import to_github, to_sarif
from normscope.report.audits import depth_profile, model_graph
from normscope.report.results import results_report, shown_results
from tests.cases import randn

HOSTILE = (
    "block[a]", "x[/red]y", "[bold]x", "[link=javascript:alert(1)]y[/link]", "[a](javascript:alert(1))", "{0}",
    "a\x1b]8;;http://x\x07b", "\x1b[31mred", "\x9b31m", "back\x08\x08", "line\n::error::gotcha", "\r\n::error::x", "::error::start",
    "##[error]x", "##vso[task]x", "\u202eevil", "\u2066a", "\u2028::error::x", "half\ud800", "\udcff", "\x7f", "a\0b", ":warning:",
    "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "'\"&amp;", "%0A::error::x", "a,line=1::x", "\\[a](b)",
    "\xa0", "\ufeff", "x" * 300,
)  # fmt: skip
IDS = [visible(name)[:24] for name in HOSTILE]


Names = tuple[str, ...]
GROUPS: tuple[Names, ...] = tuple(HOSTILE[start : start + 4] for start in range(0, len(HOSTILE), 4))
GROUP_IDS = [visible(" ".join(names))[:40] for names in GROUPS]


def network(names: Names) -> nn.Module:
    """Four layers of these names, in a class of the first; the doctor has something to say of the first, and symmetries move three."""
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)]
    made = type(names[0], (nn.Sequential,), {})(OrderedDict(zip(names, layers, strict=True)))
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return made.eval()


DATA = (randn(12, 4), torch.arange(12) % 3)


def finding(name: str) -> Finding:
    return Finding("NS101", "warning", name, f"{name} is bad", f"mend {name}", {"at": name, "x": 1.0}, f"{name}:3")


RESULTS: dict[str, Any] = {
    "bracket": lambda names: ns.lipschitz(network(names), randn(2, 4), effort=0.1),
    "certificate": lambda names: ns.lipschitz(network(names), randn(2, 4), effort=0.1).certificate,
    "audit": lambda names: ns.audit(network(names), randn(2, 4), effort=0.1),
    "findings": lambda names: ns.doctor(network(names), randn(2, 4)),
    "finding": lambda names: finding("".join(names)),
    "symmetries": lambda names: ns.symmetries(network(names), randn(2, 4)),
    "curvature": lambda names: ns.hessian(network(names), nn.functional.cross_entropy, DATA),
    "guarantees": lambda names: ns.generalization(network(names), "zero-one", DATA, held_out=DATA, select=["Golowich et al. 2018"]),
    "margins": lambda names: ns.bounds.margins(network(names), DATA),
}


def shown(result: Any) -> dict[str, str]:
    """A result in every form that a terminal or a notebook takes."""
    console = Console(width=100, force_terminal=True, file=None)  # a user's own, with markup and emoji
    with console.capture() as captured:
        console.print(result)
    forms = {"print": str(result), "rich": captured.get()}
    return forms | ({"notebook": result._repr_html_()} if hasattr(result, "_repr_html_") else {})


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", RESULTS)
def test_a_hostile_name_is_shown_as_its_escapes(kind: str) -> None:
    """A result about a name is, word for word, the one about the name's visible form, which holds nothing to obey."""
    for names in GROUPS if kind not in ("curvature", "guarantees", "margins") else GROUPS[:1]:  # which name the model alone
        found, expected = shown(RESULTS[kind](names)), shown(RESULTS[kind](tuple(map(visible, names))))
        if kind != "certificate":
            assert found["rich"] == expected["rich"]
        assert found["print"] == expected["print"]
        assert all(line.isprintable() for line in found["print"].split("\n")) and not COMMANDS.search(found["print"])
        if "notebook" in found:
            assert found["notebook"] == expected["notebook"]
            assert not re.search(r"<(?!/?(pre|span)\b)", found["notebook"]) and "href" not in found["notebook"]


def test_names_are_whole_where_there_is_room() -> None:
    table = Table()
    for name in HOSTILE[:-1]:
        table.add_row(name)
    console = Console(width=200, file=None)
    with console.capture() as captured:
        console.print(table)
        console.print(*(Text(f"· {name}") for name in HOSTILE[:-1]), sep="\n")
    for name in HOSTILE[:-1]:
        assert captured.get().count(visible(name).strip()) >= 2, name


def findings(name: str) -> Findings:
    return Findings((finding(name),), ("NS101",), {"NS203": f"{name} has no data"})


@pytest.mark.parametrize("name", HOSTILE, ids=IDS)
def test_annotations_are_one_command_each(name: str) -> None:
    (line,) = to_github(findings(name))
    assert line.isprintable()
    command, _, message = line[2:].partition("::")
    properties = dict(part.split("=", 1) for part in command.partition(" ")[2].split(","))
    assert properties == {"file": annotation(name, name=True), "line": "3", "title": "NS101"}
    assert message.replace("%25", "%") == f"{visible(name)}: {visible(name)} is bad. mend {visible(name)}"


@pytest.mark.parametrize("name", HOSTILE, ids=IDS)
def test_sarif_has_text_not_links(name: str) -> None:
    content = to_sarif(findings(name), f"{name}:net")
    text = json.dumps(content, ensure_ascii=False)
    text.encode()  # no half of a character
    (result,) = content["runs"][0]["results"]
    message = result["message"]["text"]
    assert message.isprintable() and not re.search(r"(?<!\\)(\\\\)*[\[\]]", message) and not re.search(r"(?<!\{)\{\d", message)
    address = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch(r"[A-Za-z0-9_.~/%-]+", address)
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == visible(name)


@pytest.mark.quick(3)
@pytest.mark.parametrize("names", GROUPS, ids=GROUP_IDS)
def test_pages_and_json_stand_any_name(names: Names, tmp_path: Path) -> None:
    audit = ns.audit(network(names), randn(2, 4), effort=0.1)
    audit.to_html(tmp_path / "audit.html")
    pages = [(tmp_path / "audit.html").read_text(encoding="utf-8")]
    for kind, result in {"audit": audit, "doctor": audit.findings, "own": findings("".join(names))}.items():
        result.to_json(tmp_path / f"{kind}.json")
        assert json.loads((tmp_path / f"{kind}.json").read_text(encoding="utf-8")) == json.loads(json.dumps(result.to_dict()))
        pages.append(results_report([shown_results(tmp_path / f"{kind}.json")]))
    for page in pages:
        words = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
        assert all(c.isprintable() or c == "\n" for c in html.unescape(words))
        assert "<img" not in words and "<script" not in words and "javascript:" not in "".join(re.findall(r'href="([^"]*)"', words))
    for figure in (depth_profile(audit), model_graph(audit)):
        drawn = json.loads(figure.to_json(), object_pairs_hook=list)
        assert not any("<img" in text or "<script" in text or not text.replace("\n", "").isprintable() for text in strings(drawn))


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for part in value for text in strings(part)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", HOSTILE, ids=IDS)
def test_an_error_is_text(name: str) -> None:
    assert all(line.isprintable() for line in str(ns.InputError(f"no layer {name}")).split("\n"))


def test_every_boundary_can_be_passed_twice() -> None:
    for name in HOSTILE:
        assert visible(visible(name)) == visible(name) and inert(inert(name)) == inert(name)
        assert json.loads(encodable(json.dumps(name, ensure_ascii=False))) == name
        assert uri(name).isascii() and sarif_message(name).isprintable()


def test_only_the_boundary_makes_text_for_terminals() -> None:
    """Who imports rich's own Text or Table lets names pass as markup."""
    package = Path(ns.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"from rich\.(text|table|markup) ", path.read_text())
    }
    assert users == {"core/rendering.py"}
