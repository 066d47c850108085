"""Running an experiment: trials that are not finished yet, then the judgement, result.json and the figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from normscope._watch.store import plain
from normscope.core.codec import encode
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.papers import LAB_SCHEMA
from normscope.core.progress import Progress, shown
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result
from normscope.lab.executors import Executor, InProcess, Processes
from normscope.lab.experiment import Comparison, Experiment, Plot, Results, TrialResult, find
from normscope.lab.tasks import RESULT, VERSIONS, Failure, Record, Task, run_task, tasks
from normscope.lab.workspace import write_atomically, writing

SCHEMA = LAB_SCHEMA
AGREES, PARTLY, DIFFERS, SILENT, INCOMPLETE = "agrees", "agrees in part", "differs", "measured", "incomplete"
COLOURS = {AGREES: "green", PARTLY: "yellow", DIFFERS: "bold red", SILENT: "magenta", INCOMPLETE: "bold red"}
RETRIES = 2
DEFAULT = Path("runs/lab")


@dataclass(frozen=True, repr=False)
class Outcome(Result):
    """What an experiment's result.json holds; `comparisons` are the paper's figures beside ours. directory: of its figures."""

    schema = SCHEMA

    directory: Path | None
    content: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.content["verdict"])

    @property
    def comparisons(self) -> list[Comparison]:
        return [Comparison(**row) for row in self.content["comparisons"]]

    @property
    def failures(self) -> list[dict[str, Any]]:
        return list(self.content["failures"])

    def to_dict(self) -> dict[str, Any]:
        """The content of result.json."""
        return dict(self.content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Outcome:
        """The outcome that `to_dict` described, without its figures, which are files in `directory`."""
        return cls(None, content)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """The experiment's own, which `run_experiment` has drawn."""
        if self.directory is None:
            return {}
        return {name: partial(_read_figure, self.directory / "figures" / f"{name}.json") for name in self.content["figures"]}

    def render(self) -> RenderableType:
        content = self.content
        head = Text.assemble((str(content["experiment"]), "bold"), f" ({content['source']}), {content['mode']} settings: ")
        head.append(self.verdict, COLOURS[self.verdict])
        table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False)
        for name in ("quantity", "the paper", "here", ""):
            table.add_column(name, overflow="fold")
        for row in self.comparisons:
            table.add_row(row.quantity, row.paper, row.ours, row.answer)
        settings = ", ".join(f"{name} {json.dumps(value)}" for name, value in content["settings"].items())
        notes = [f"{failure['label']} seed {failure['seed']} failed: {failure['error']}" for failure in self.failures]
        notes += [f"{lost['label']} seed {lost['seed']} was tried again" for lost in content["retried"]]
        notes += [f"settings: {settings}", f"{len(content['trials'])} trials"]
        return Group(head, Text(str(content["statement"])), table, *(Text(note, "dim") for note in notes))


@earlier(positional=9)
def run_experiment(
    name: str,
    *,
    full: bool = False,
    settings: Mapping[str, str] | None = None,
    out: str | Path = DEFAULT,
    data_directory: Path | None = None,
    workers: int = 1,
    threads: int = 1,
    executor: Executor | None = None,
    fresh: bool = False,
    progress: Progress = None,
) -> Outcome:
    """Run an experiment, or finish it where it stopped: finished trials are kept, and a started one goes on from its checkpoint.

    name: of the experiment, as `normscope lab list` prints it.
    full: the paper's settings instead of the quick ones.
    settings: changes, as words on a command line.
    out: where trials and results go.
    data_directory: where the data set's files are.
    workers: how many trials run at a time, each in its own process.
    threads: of torch in each process.
    executor: where trials run instead, such as a Ray cluster.
    fresh: run finished trials again.
    progress: True for a bar on stderr, or a callable (what, done, total), in trials; a running one counts in part.
    """
    experiment = find(name)
    chosen = (experiment.full if full else experiment.quick).changed(settings or {})
    work = tasks(experiment, chosen, Path(out) / "trials", data_directory, threads)
    if not work:
        raise InputError(f"{name} has no trials with these settings: give at least one seed, and one of all else that it varies")
    _made(Path(out) / "trials")
    if fresh:
        for task in work:
            shutil.rmtree(task.directory, ignore_errors=True)
    executor = executor or (InProcess() if workers == 1 else Processes(workers))
    with shown(name, progress) as meter:
        *retried, failures = _run_all(executor, work, partial(meter.report or _unheard, name))
    directory = result_directory(out, name, full)
    content = _content(experiment, chosen, full, work, failures)
    content["retried"] = [_described(failure) for round in retried for failure in round]
    content["figures"] = [] if failures else _write_figures(experiment, _results(work), directory / "figures")
    write_atomically(_made(directory) / RESULT, (encode(content) + "\n").encode())
    return Outcome(directory, content)


def run_trials(name: str, settings: Mapping[str, str], out: str | Path) -> Results:
    """The trials of an experiment's quick settings with changes, one after another in this process; no judgement, no figures."""
    experiment = find(name)
    work = tasks(experiment, experiment.quick.changed(settings), Path(out) / "trials", None, threads=1)
    for task in work:
        if task.result is None:
            run_task(task)
    return _results(work)


@earlier(positional=2)
def load_experiment(name: str, *, full: bool = False, out: str | Path = DEFAULT) -> Outcome:
    """The outcome of an experiment that was run before.

    name: of the experiment, as `normscope lab list` prints it.
    full: that of the paper's settings instead of the quick ones.
    out: where its results are.
    """
    directory = result_directory(out, find(name).name, full)
    try:
        return Outcome(directory, json.loads((directory / RESULT).read_text()))
    except FileNotFoundError:
        command = f"normscope lab run {name}" + (" --full" if full else "")
        raise InputError(f"no result in {directory}: run it first with `{command}`") from None
    except ValueError as error:
        raise InputError(f"{directory / RESULT} is damaged: run the experiment again; its finished trials are kept") from error


def result_directory(out: str | Path, name: str, full: bool) -> Path:
    return Path(out) / (f"{name}-full" if full else name)


def verdict(comparisons: Sequence[Comparison]) -> str:
    """One word for all: whether what was measured is what the paper says."""
    decided = [row.agrees for row in comparisons if row.agrees is not None]
    if not decided:
        return SILENT
    return AGREES if all(decided) else PARTLY if any(decided) else DIFFERS


def judged(experiment: Experiment[Any, Any], results: Results) -> list[Comparison]:
    """The judgement on all trials; where there are several seeds, each answer with how many of them give it alone."""
    rows = list(experiment.judge(results))
    alone = [list(experiment.judge(part)) for part in results.by_seed()]
    if len(alone) == 1 or any(len(part) != len(rows) for part in alone):
        return rows
    same = [sum(part[index].agrees == row.agrees for part in alone) for index, row in enumerate(rows)]
    return [
        row if row.agrees is None else replace(row, seeds=f"{count} of {len(alone)}") for row, count in zip(rows, same, strict=True)
    ]


def _unheard(what: str, done: float, total: float) -> None:
    pass


def _run_all(executor: Executor, work: Sequence[Task], progress: Callable[[float, int], None]) -> list[list[Failure]]:
    """Run what is not finished, and what fails again, up to RETRIES times; the failures of each round, the last one's last."""
    waiting = list({task.directory: task for task in work if task.result is None}.values())
    total, finished = len(waiting), 0
    rounds: list[list[Failure]] = [[]]
    for _ in range(1 + RETRIES):
        if not waiting:
            break

        def report(done: float, before: int = finished) -> None:
            progress(before + done, total)

        rounds.append([outcome for _, outcome in executor.run(waiting, report) if isinstance(outcome, Failure)])
        waiting = [failure.task for failure in rounds[-1]]
        finished = total - len(waiting)
    return rounds


def _results(work: Sequence[Task]) -> Results:
    return Results([_trial_result(task, record) for task in work if (record := task.result) is not None])


def _trial_result(task: Task, record: Record) -> TrialResult:
    parameters = plain(asdict(task.trial))  # the record of an old trial lacks parameters that were added since
    return TrialResult(task.label, task.seed, {**parameters, **parameters.get("options", {})}, record["numbers"])


def _content(
    experiment: Experiment[Any, Any], settings: Any, full: bool, work: Sequence[Task], failures: Sequence[Failure]
) -> dict[str, Any]:
    comparisons = [] if failures else judged(experiment, _results(work))
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "source": experiment.source,
        "statement": experiment.statement,
        "mode": "full" if full else "quick",
        "settings": plain(asdict(settings)),
        "versions": VERSIONS,
        "verdict": INCOMPLETE if failures else verdict(comparisons),
        "comparisons": [asdict(row) for row in comparisons],
        "failures": [_described(failure) for failure in failures],
        "trials": [_summary(task, record) for task in work if (record := task.result) is not None],
    }


def _described(failure: Failure) -> dict[str, Any]:
    return {"label": failure.task.label, "seed": failure.task.seed, "error": failure.error}


def _summary(task: Task, record: Record) -> dict[str, Any]:
    """A trial without its lists and tables, which stay in its own directory."""
    numbers = {name: value for name, value in record["numbers"].items() if not isinstance(value, (dict, list))}
    return {
        "label": task.label,
        "seed": task.seed,
        "parameters": record["parameters"],
        "numbers": numbers,
        "seconds": record["seconds"],
        "directory": str(Path(task.directory.parent.name) / task.directory.name),
    }


def _read_figure(path: Path) -> Any:
    import plotly.io

    try:
        return plotly.io.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the figure {path}: run the experiment again; its finished trials are kept") from error


def _write_figures(experiment: Experiment[Any, Any], results: Results, directory: Path) -> list[str]:
    from normscope.report.plots import plot

    _made(directory)
    plots: Mapping[str, Plot] = experiment.plots(results)
    for name, made in plots.items():
        figure = plot(made)
        with writing(directory):
            figure.write_html(directory / f"{name}.html", include_plotlyjs=True)
        write_atomically(directory / f"{name}.json", figure.to_json().encode())
    return list(plots)


def _made(directory: Path) -> Path:
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory
