"""`normscope demo`: one network, trained plain, with BN and with LN on handwritten digits, and what the audit says of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.options import seed_of
from normscope.cli.output import terminal
from normscope.core.progress import progress_bar
from normscope.core.rendering import Group, RenderableType, Table, Text

if TYPE_CHECKING:
    import torch

    from normscope.auditing import Audit
    from normscope.curvature.sharpness import Sharpness
    from normscope.curvature.spectrum import Condition
    from normscope.digits import Labelled

SCHEMA = "normscope.demo/1"
WIDTH, DEPTH, CLASSES, EPOCHS, BATCH, LEARNING_RATE = 128, 10, 10, 40, 64, 1e-3
NETWORKS = {"plain": "none", "BN": "batch", "LN": "layer"}  # column → normalizer, the only difference
EFFORT = 2.0
CURVED = 512  # training digits whose loss is differentiated twice
RUNS, BUDGET = Path("runs/demo"), 0.05  # more than the default share, for a training of seconds
DEFINITIONS = {  # name: formula → product of the audit, over all normalizers
    "tight: largest |γ|/σ": "normalizers_tight",
    "paper: ‖1/σ‖ over channels, for LN 1/min σ": "normalizers_paper",
    "paper with γ: ‖γ/σ‖ over channels": "normalizers_paper_affine",
    "1/σ per layer: one average σ for all channels": "normalizers_layer",
}
REPORT = "report.html"  # beside the recorded trainings
NEXT = """How to go on, layer by layer and with a model of yours:
  normscope audit normscope.lab.models:mlp --input 3x32x32
  normscope audit your_file.py:make_model --input 3x224x224 --weights your.safetensors"""


@dataclass(frozen=True)
class DemoNetwork:
    """One network of the demo: what it gets right on unseen digits, its audit, and how its training loss curves."""

    accuracy: float
    audit: Audit
    sharpness: Sharpness


def demo(
    seed: Annotated[int, seed_of("the weights, the order of the data and the search")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = EPOCHS,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where to record the three trainings.")] = RUNS,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """The whole story in a minute: train three small networks that differ in their normalizer, and audit them."""
    with progress_bar() as bar, one_thread():
        task = bar.add_task("loading", total=len(NETWORKS) * (epochs + 1))

        import torch

        import normscope as ns
        from normscope.digits import digits

        learned, unseen = digits()
        found: dict[str, DemoNetwork] = {}
        for name, normalizer in NETWORKS.items():
            bar.update(task, description=f"training {name}")
            model = train(learned, normalizer, seed, epochs, runs / name, each_epoch=lambda: bar.advance(task))
            bar.update(task, description=f"auditing {name}")
            images, generator = unseen[0], torch.Generator().manual_seed(seed)
            audit = ns.audit(model, images[:8], data=images, effort=EFFORT, generator=generator)
            bar.update(task, description=f"curvature of {name}")
            found[name] = DemoNetwork(accuracy(model, unseen), audit, curvature(model, learned))
            bar.advance(task)
        bar.update(task, description="writing the report")
        page = write_report(runs)
    if json:
        print(as_json(found, seed, epochs))
    else:
        terminal().print(render(found, runs, page))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: for matrices so small, threads mostly wait for each other, and rounding depends on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    data: Labelled, normalizer: str, seed: int, epochs: int, run: Path, each_epoch: Callable[[], None] = lambda: None
) -> torch.nn.Module:
    """A ReLU MLP trained with AdamW and a cosine schedule, recorded in `run`.

    seed fixes its first weights and the order of the data. A recording of an earlier demo is replaced.
    """
    import torch

    import normscope as ns

    inputs, classes = data
    model = network(inputs[0].numel(), normalizer, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    order = torch.Generator().manual_seed(seed)
    known = ns.symmetries(model, inputs[:2])
    with ns.watch(model, optimizer, run=run, budget=BUDGET, overwrite=True, symmetries=known, quiet=True) as watch:
        for _ in range(epochs):
            for batch in torch.randperm(len(inputs), generator=order).split(BATCH):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs[batch]), classes[batch])
                loss.backward()
                optimizer.step()
                watch.step(loss=loss)
            schedule.step()
            each_epoch()
    return model.eval()


def network(inputs: int, normalizer: str, generator: torch.Generator) -> torch.nn.Module:
    """`DEPTH` linear layers with He-normal weights and zero biases; between them a normalizer, if any, and a ReLU."""
    from torch import nn

    kinds = {"none": (), "batch": (nn.BatchNorm1d,), "layer": (nn.LayerNorm,)}[normalizer]
    layers: list[nn.Module] = [nn.Flatten()]
    for place, width in enumerate([inputs, *[WIDTH] * (DEPTH - 1)], start=1):
        last = place == DEPTH
        linear = nn.utils.skip_init(nn.Linear, width, CLASSES if last else WIDTH)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="linear" if last else "relu", generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, *(kind(WIDTH) for kind in kinds), nn.ReLU()]
    return nn.Sequential(*layers)


def accuracy(model: torch.nn.Module, data: Labelled) -> float:
    """The part of the digits that the model gets right."""
    from normscope.core.answers import right_answers

    inputs, classes = data
    return float(right_answers(model(inputs), classes).double().mean())


def curvature(model: torch.nn.Module, data: Labelled) -> Sharpness:
    """Of the loss on some training digits, with batch statistics."""
    from torch.nn.functional import cross_entropy

    import normscope as ns
    from normscope.curvature.sharpness import Sharpness

    inputs, classes = data
    return Sharpness.of(ns.hessian(model, cross_entropy, (inputs[:CURVED], classes[:CURVED]), mode="train"))


def write_report(runs: Path) -> Path:
    """The three trainings side by side, as one page."""
    from normscope.report.file import write_report

    page = runs / REPORT
    write_report([runs / name for name in NETWORKS], page)
    return page


def render(found: Mapping[str, DemoNetwork], runs: Path, page: Path) -> RenderableType:
    """The table, what its numbers say, and what to try next; fits 100 columns."""
    title = Text(f"A {DEPTH}-layer ReLU network, width {WIDTH}, trained on digits; the normalizer is the only difference\n")
    said = [Text(f"\n{sentence}") for sentence in sentences(found)]
    return Group(title, table(found), *said, *(Text.of_lines(["", *words.splitlines()]) for words in (pictures(runs, page), NEXT)))


def pictures(runs: Path, page: Path) -> str:
    """How to see what was recorded."""
    return f"""The three trainings in pictures, as a page to open in a browser (it needs no network) and as a dashboard:
  {page}
  normscope serve {runs}"""


def table(found: Mapping[str, DemoNetwork]) -> Table:
    """One column per network, one row per number that a newcomer can read."""
    made = Table(box=None, pad_edge=False, padding=(0, 2), collapse_padding=True)
    made.add_column("")
    for name in found:
        made.add_column("plain" if name == "plain" else f"with {name}", justify="right", no_wrap=True)
    audits = [trained.audit for trained in found.values()]
    made.add_row("accuracy on unseen digits", *(f"{100 * trained.accuracy:.1f}%" for trained in found.values()))
    made.add_row("Lipschitz constant: at least (a pair of inputs shows it)", *(power(a.bracket.lower.log10) for a in audits))
    made.add_row("                    at most (proved, for all inputs)", *(power(a.bracket.proved.log10) for a in audits))
    made.add_row("around one unseen digit: at least", *("–" if a.local is None else str(a.local.lower) for a in audits))
    made.add_row("                         at most (proved)", *("–" if a.local is None else str(a.local.upper) for a in audits))
    made.add_row("product of weight norms ∏‖W‖", *(power(a.products["weights_spectral"]) for a in audits))
    made.add_row("what the normalizers do to that product, if each counts as", *[""] * len(audits))
    for label, key in DEFINITIONS.items():
        made.add_row(f"  {label}", *(effect(a, key) for a in audits))
    made.add_row("sharpest curvature of the training loss, λ_max", *(f"{t.sharpness.largest.value:.3g}" for t in found.values()))
    made.add_row("its condition number κ", *(at_least(t.sharpness.condition) for t in found.values()))
    return made


def sentences(found: Mapping[str, DemoNetwork]) -> list[str]:
    """What the numbers say, in words that follow from them."""
    plain, batch, layer = (found[name].audit for name in NETWORKS)
    scores = ", ".join(f"{100 * trained.accuracy:.1f}% ({name})" for name, trained in found.items())
    return [
        f"Trained alike, the three are right on {scores} of the digits that they have not seen.",
        f"Two outputs of the plain network are never more than {power(plain.bracket.proved.log10)} times as far apart as their "
        f"inputs: that is proved. The search found two inputs that reach {power(plain.bracket.lower.log10)}, so the Lipschitz "
        "constant lies between these numbers.",
        *_about_nearby(found),
        _about_batch_norm(plain, batch),
        _about_definitions(batch),
        _about_layer_norm(layer),
        _about_curvature(found["plain"].sharpness, found["BN"].sharpness),
    ]


def _about_nearby(found: Mapping[str, DemoNetwork]) -> list[str]:
    near = [(name, trained.audit) for name, trained in found.items() if trained.audit.local is not None]
    said = [
        f"{a.local.lower} ≤ L ≤ {a.local.upper} ({name}; over all inputs at most {power(a.bracket.proved.log10)})"
        for name, a in near
        if a.local is not None
    ]
    if not said:
        return []
    return [
        "A bound over all inputs is about the worst input imaginable. Around one unseen digit, within a thousandth of its norm: "
        f"{', '.join(said)}."
    ]


def _about_batch_norm(plain: Audit, batch: Audit) -> str:
    change = batch.bracket.proved.log10 - plain.bracket.proved.log10
    apart = batch.products["weights_spectral"] + batch.products["normalizers_tight"]
    factor = f"{10 ** abs(change):.1f}" if abs(change) < 2 else power(abs(change))
    verdict = "about as large as without" if abs(change) < 0.1 else f"{factor} times {'larger' if change > 0 else 'smaller'}"
    return (
        f"With BN the proved bound is {verdict}. Multiplying its weight norms by the tight gains would give {power(apart)}; "
        f"bounding layers together, each BN folded into its weight, proves {power(batch.bracket.proved.log10)}."
    )


def _about_definitions(batch: Audit) -> str:
    values = {label.partition(":")[0]: batch.products[key] for label, key in DEFINITIONS.items()}
    removing = sum(value < 0 for value in values.values())
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    votes = {0: "all four say that it adds", len(values): "all four say that it removes"}
    vote = votes.get(removing, f"{removing} of four say that it removes")
    return (
        f"How much BN removes or adds depends on what its gain is taken to be: from {power(values[low])} ({low}) "
        f"to {power(values[high])} ({high}); {vote}. Only the tight one is the layer's own Lipschitz constant."
    )


def _about_layer_norm(layer: Audit) -> str:
    gains = [step.gain.log10 for step in layer.bracket.certificate.steps if step.operation == "layer_norm"]
    return (
        f"LN's proved bound of {power(layer.bracket.proved.log10)} holds for every input, since no region was given: where all "
        f"entries are nearly equal an LN divides by √ε, so {len(gains)} of them may stretch by {power(sum(gains))} in all. "
        f"On the test digits they multiply by {power(layer.products['normalizers_tight'])}, and the search found "
        f"{power(layer.bracket.lower.log10)} for the whole network."
    )


def _about_curvature(plain: Sharpness, batch: Sharpness) -> str:
    ratio = plain.largest.value / batch.largest.value
    change = f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"
    return (
        f"The training loss curves {change} at its sharpest with BN, measured once, with batch statistics; Akbar's experiment 2 "
        "says 5 times smaller. His condition numbers, 20 with BN against 200, are not comparable with lower bounds (≥)."
    )


def at_least(condition: Condition) -> str:
    """A condition number, with ≥ where it is a lower bound."""
    return f"{'' if condition.exact else '≥ '}{condition.value:.3g}"


def power(log10: float) -> str:
    """10^x, with one digit after the point."""
    return f"10^{log10:z.1f}"


def effect(audit: Audit, key: str) -> str:
    """What a product of gains does, in a word: removes or adds so many powers of ten."""
    value = audit.products[key]
    if not any(row.gain is not None for row in audit.layers):
        return "–"
    return "changes nothing" if abs(value) < 0.05 else f"{'adds' if value > 0 else 'removes'} {power(abs(value))}"


def as_json(found: Mapping[str, DemoNetwork], seed: int, epochs: int) -> str:
    """The demo's numbers and its sentences as JSON text; each audit as `normscope audit --json` has it."""
    from normscope.core.codec import encode

    networks: dict[str, Any] = {
        name: {
            "accuracy": trained.accuracy,
            "audit": trained.audit.to_dict(),
            "largest_eigenvalue": trained.sharpness.largest.value,
            "condition": trained.sharpness.condition.value,
            "condition_is_exact": trained.sharpness.condition.exact,
        }
        for name, trained in found.items()
    }
    setting = {"width": WIDTH, "depth": DEPTH, "epochs": epochs, "seed": seed}
    content = {"schema": SCHEMA, "setting": setting, "networks": networks, "reading": sentences(found)}
    return encode(content)
