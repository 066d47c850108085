"""The report as a file: of runs, of results that commands wrote as JSON, or of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normscope.report.results import results_of_run, results_report, shown_results
from normscope.report.run_page import COLUMNS, run_report
from normscope.report.snapshot import Snapshot


def write_report(paths: Sequence[str | Path], out: str | Path) -> list[str]:
    """One HTML file of directories of runs, with what lies in their `results` folders, and of JSON files.

    Returns a line for every result that could not be shown; the page has it too.
    """
    places = [Path(path) for path in paths]
    directories = [path for path in places if not _is_result(path)]
    runs = [Snapshot.of(path, COLUMNS) for path in directories]
    results = [shown for path in directories for shown in results_of_run(path)]
    results += [shown_results(path) for path in places if _is_result(path)]
    text = run_report(runs, results) if runs else results_report(results)
    Path(out).write_text(text, encoding="utf-8")
    return [shown.problem for shown in results if shown.problem]


def _is_result(path: Path) -> bool:
    return path.is_file() or (path.suffix == ".json" and not path.is_dir())
