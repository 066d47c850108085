"""Results that commands wrote as JSON, as parts of a report: each file is known by the `schema` of its records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope._watch.directory import opened, read_at
from normscope._watch.growing import held
from normscope.core.errors import InputError, NormscopeError, first_line
from normscope.core.result import Result
from normscope.report.html import Drawing, Page, section
from normscope.report.markup import Child, Markup, element
from normscope.report.result_sections import SECTIONS, Section, section_of

FOLDER = "results"  # of a run's directory
MOST_BYTES = 64 << 20
HELD = 8  # times as much as that may what is read take in memory
# of records unlike their schema; RuntimeError: torch's, of shapes that do not fit
DAMAGED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, NormscopeError)


@dataclass(frozen=True)
class Shown:
    """A result as a report has it: a section, or one line that says why there is none. path: its file, if it has one."""

    path: Path | None
    section: Section | None = None
    problem: str = ""


def read_results(path: Path, most: int = MOST_BYTES, links: bool = True) -> list[Any]:
    """The records of a file: the objects of a list, or the one that it holds. most: bytes. links: whether it may be one."""
    try:
        with opened(path.resolve() if links else path) as (file, state):
            if state.st_size > most:
                raise InputError(f"it has {state.st_size >> 20} MB, more than the {most >> 20} MB of a result")
            content = read_at(file, most, 0)
    except (InputError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise InputError(f"cannot read {path}: {error}") from error
    if held(content) > HELD * most:
        raise InputError(f"cannot read {path}: its lists and objects would take more than {HELD * most >> 20} MB of memory")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({first_line(error)}): write it again, or leave it out") from error
    return found if isinstance(found, list) else [found]


def shown_results(path: Path, most: int = MOST_BYTES, links: bool = True) -> Shown:
    """The file's section by the table SECTIONS; whatever its records hold, at worst a line that says why they are not shown."""
    records = read_results(path, most, links)
    schemas = [record.get("schema") if isinstance(record, dict) else None for record in records]
    schema = schemas[0] if schemas and schemas.count(schemas[0]) == len(schemas) else None
    if not isinstance(schema, str) or schema not in SECTIONS:
        known = ", ".join(SECTIONS)
        return Shown(path, problem=f"{path.name} is not shown: its schema is none of {known}")
    try:
        return Shown(path, SECTIONS[schema](records))
    except DAMAGED as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return Shown(path, problem=f"{path.name} is not shown: it is not what {schema} says ({why})")


def results_of_run(run: Path) -> list[Shown]:
    """What lies in the folder `results` of a run; what cannot be read is a line, not an error."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            found.append(shown_results(path))
        except InputError as error:
            found.append(Shown(path, problem=str(error)))
    return found


def results_report(results: Sequence[Shown]) -> str:
    """The report of results without a run, as HTML text."""
    page = Page()
    body = [section("summary", "Summary", headlines(results)), *result_sections(page, results)]
    titles = [shown.section.title for shown in results if shown.section]
    title = titles[0] if len(results) == len(titles) == 1 else f"{len(titles)} results"
    return page.render(title, *body, sections=[("summary", "Summary"), *anchors(results)])


def result_page(*results: Result) -> str:
    """The report of results, as HTML text."""
    return results_report([Shown(None, section_of(result)) for result in results])


def headlines(results: Sequence[Shown]) -> Markup | None:
    """Each result in a sentence, with the way to its section."""
    links = iter(anchors(results))
    items: list[Child] = []
    for shown in results:
        if shown.section is None:
            items.append(element("li", shown.problem))
        else:
            anchor, title = next(links)
            items.append(element("li", element("a", title, href=f"#{anchor}"), f": {shown.section.headline}"))
    return element("article", element("h3", "Results"), element("ul", items), class_="results") if items else None


def anchors(results: Sequence[Shown]) -> list[tuple[str, str]]:
    """(id, title) of every section."""
    sections = [shown.section for shown in results if shown.section]
    return [(f"result-{place}", made.title) for place, made in enumerate(sections, start=1)]


def result_sections(page: Page, results: Sequence[Shown]) -> list[Markup]:
    """The results as sections of a page, each with the file that it comes from."""
    made = [(shown.path, shown.section) for shown in results if shown.section]
    return [
        section(
            anchor,
            title,
            element("p", f"From {path.name}.", class_="soft") if path else None,
            *(_placed(page, part) for part in own.parts),
        )
        for (anchor, title), (path, own) in zip(anchors(results), made, strict=True)
    ]


def _placed(page: Page, part: Drawing | Child) -> Child:
    return page.draw(part) if isinstance(part, Drawing) else part
