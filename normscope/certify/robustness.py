"""Brackets around samples, and the radii within which a classifier's answer is proved not to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.utils.data import Dataset

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.lipschitz import bracket
from normscope.certify.upper import upper
from normscope.core.answers import has_answer
from normscope.core.bracket import Bracket
from normscope.core.codec import number, plain
from normscope.core.data import Call, Data, Example, calls_of_graph
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.magnitude import ZERO, Magnitude
from normscope.core.progress import Progress, shown
from normscope.core.region import Ball
from normscope.core.rendering import Text
from normscope.core.result import Result
from normscope.core.rounding import FUNCTION, below, root
from normscope.graph.graph import Graph

MOST_BALLS = 8  # of a sample, beyond those of the given radii
CLOSE = 1.05  # a radius and a ball that is too large, from which on no other is tried


@dataclass(frozen=True, repr=False)
class LocalBrackets(Result):
    """The brackets of a model on balls of one radius around samples."""

    schema = "normscope.local_brackets/1"

    radius: float
    brackets: tuple[Bracket, ...]

    @property
    def largest(self) -> Bracket:
        """For the whole set: no ball has a constant above its upper side, and some ball has one above its lower side."""
        top = max(self.brackets, key=lambda bracket: bracket.lower)
        above = max(self.brackets, key=lambda bracket: (bracket.upper is None, bracket.upper or ZERO))
        return Bracket(top.lower, above.upper, top.witness, above.certificate, notes=above.notes)

    def __len__(self) -> int:
        return len(self.brackets)

    def to_dict(self) -> dict[str, Any]:
        """The bracket of every ball, in the order of the samples."""
        return {"schema": self.schema, "radius": self.radius, "brackets": [bracket.to_dict() for bracket in self.brackets]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LocalBrackets:
        """The brackets that `to_dict` described, without their witnesses."""
        return cls(number(content["radius"]), tuple(map(Bracket.from_dict, content["brackets"])))

    def render(self) -> Text:
        uppers = sorted(bracket.upper for bracket in self.brackets if bracket.upper is not None)
        missing = len(self) - len(uppers)
        rest = f"{missing} without a bound" if missing else f"median upper {uppers[len(uppers) // 2]}"
        return Text(f"{len(self)} balls of radius {self.radius:g}: {self.largest}; {rest}")


@earlier(positional=4)
@boundary
def local_brackets(
    model: torch.nn.Module,
    example: Example,
    data: Data,
    *,
    radius: float,
    output: str | int | None = None,
    effort: float = 0.2,
    progress: Progress = None,
) -> LocalBrackets:
    """Bracket a model on the ball of `radius` around every sample of `data`; norms of weights are computed once.

    A ball on which neither a finite bound nor evidence of infinity is found has `upper` None, with the reason in its certificate.

    data: inputs, or (inputs, labels), whose labels are not looked at.
    radius: of every ball, in l2.
    output: name or position of the output to bound, where the model returns several.
    effort: how long to search for each lower bound, and how much each upper bound may cost.
    progress: True for a bar on stderr, or a callable (what, done, total); the total is not known and 0.
    """
    graph, call, known = certifiable_graph(model, example, "eval", output), Call.of(example), Known()
    found = []
    with shown("balls", progress) as meter:
        for sample in _samples(call, data):
            ball = Ball(sample, radius)
            above = upper(graph, region=ball, known=known, effort=effort)
            found.append(bracket(graph, above, call, ball, effort=effort, known=known))
            meter.advance()
    return LocalBrackets(radius, tuple(found))


@dataclass(frozen=True, repr=False)
class Robustness(Result):
    """Certified radii of labelled samples: within radius[i] of sample i, in ℓ2, the answer stays right.

    radius[i] is 0 for a sample that is answered wrongly.
    """

    schema = "normscope.robustness/1"

    radius: tuple[float, ...]
    margin: tuple[float, ...]

    @property
    def median(self) -> float:
        ordered = sorted(self.radius)
        return ordered[len(ordered) // 2]

    def certified_accuracy(self, radius: float) -> float:
        """The share of samples that are answered rightly on the whole ball of `radius`."""
        return sum(r >= radius and m > 0 for r, m in zip(self.radius, self.margin, strict=True)) / len(self.radius)

    def to_dict(self) -> dict[str, Any]:
        """Radius and margin of every sample."""
        return {"schema": self.schema, "median": self.median, "radius": plain(self.radius), "margin": plain(self.margin)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Robustness:
        """The radii that `to_dict` described."""
        return cls(*(tuple(number(value) for value in content[name]) for name in ("radius", "margin")))

    def render(self) -> Text:
        steps = [0.0, *(self.median * factor for factor in (0.5, 1.0, 2.0))]
        accuracy = ", ".join(f"{100 * self.certified_accuracy(r):.1f}% at {r:.3g}" for r in dict.fromkeys(steps))
        return Text(f"{len(self.radius)} samples: median certified radius {self.median:.3g}; certified accuracy {accuracy}")


@earlier(positional=3)
@boundary
def certify_radius(
    model: torch.nn.Module,
    example: Example,
    data: Data,
    *,
    radii: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0),
    output: str | int | None = None,
    progress: Progress = None,
) -> Robustness:
    """For every labelled sample the largest of min(margin/(√2 · upper), radius) over balls that a search tries.

    On the ball the difference of two outputs changes by at most √2 · upper · distance, so the answer cannot change before
    the margin is used up or the ball is left.

    data: (inputs, labels), or an iterable of such batches.
    radii: where the search begins; it goes on with larger or smaller balls until one that is too large is close to the answer.
    output: name or position of the output that classifies, where the model returns several.
    progress: True for a bar on stderr, or a callable (what, done, total); the total is not known and 0.
    """
    numbers = isinstance(radii, Iterable) and all(
        isinstance(radius, (Real, torch.Tensor)) and 0 < radius < math.inf for radius in radii
    )
    if not numbers:
        raise InputError(f"radii must be finite numbers above 0, in a list, got {radii!r}")
    graph = certifiable_graph(model, example, "eval", output)
    known = Known()
    everywhere = upper(graph, known=known).bound
    call = Call.of(example)
    radius, margin = [], []
    with shown("certifying radii", progress) as meter:
        for sample, label in _labelled(call, data):
            distance = _margin(graph, sample, label)
            margin.append(distance)
            radius.append(_radius(graph, sample, distance, everywhere, radii, known) if distance > 0 else 0.0)
            meter.advance()
    if not radius:
        raise InputError("the data holds no labelled sample")
    return Robustness(tuple(radius), tuple(margin))


def _radius(
    graph: Graph,
    sample: tuple[torch.Tensor, ...],
    margin: float,
    everywhere: Magnitude,
    radii: Sequence[float],
    known: Known,
) -> float:
    """Balls of the given radii, then larger ones or those between the best radius and the smallest ball that is too large.

    Every ball is a certificate of its own, so that nothing rests on how bounds change with the radius. The margin counts less the
    rounding of the outputs at the sample, which every ball bounds.
    """
    best, too_large = 0.0, math.inf

    def grown(radius: float) -> bool:
        """Whether the answer is certain on the whole ball."""
        nonlocal best, too_large
        on_ball = upper(graph, region=Ball(sample, radius), known=known)
        if on_ball.interrupted:
            raise KeyboardInterrupt
        certain = margin - math.sqrt(2) * on_ball.center_error
        best = max(best, _reach(certain, everywhere), min(radius, _reach(certain, on_ball.bound)))
        too_large = too_large if best >= radius else min(too_large, radius)
        return best >= radius

    for radius in sorted(map(float, radii)):
        if radius > best and not grown(radius):  # a larger ball has no smaller constant
            break
    for _ in range(MOST_BALLS):
        if math.isinf(best) or too_large <= best * CLOSE:
            break
        between = math.sqrt(best) * math.sqrt(too_large) if best else too_large / 10
        grown(2 * best if math.isinf(too_large) else between)
    return best


def _reach(margin: float, bound: Magnitude) -> float:
    if not margin > 0:
        return 0.0
    if not bound:
        return math.inf
    reach = (Magnitude(margin) / bound / root(2)).lowered(margin, bound, 2)
    return below(float(reach), 2 * FUNCTION * (1 + abs(reach.log))) if bound.finite else 0.0


def _margin(graph: Graph, sample: tuple[torch.Tensor, ...], label: int) -> float:
    """The right output less the largest other one, in float64; −∞ where NaN or overflow leave no answer."""
    with torch.no_grad():
        outputs = graph.run([part[None] for part in sample], torch.float64)[0].reshape(-1)
    if not 0 <= label < len(outputs) or len(outputs) < 2:
        raise InputError(f"label {label} does not name one of {len(outputs)} outputs")
    if not bool(has_answer(outputs[None])):
        return -math.inf
    others = torch.cat([outputs[:label], outputs[label + 1 :]])
    return float(outputs[label] - others.max())


def _samples(example: Call, data: Data) -> Iterator[tuple[torch.Tensor, ...]]:
    count = 0
    for call in calls_of_graph(data, example):
        for index in range(call.batch_size):
            sample = tuple(part[index].to(torch.float64) for part in call.floats())
            if not all(bool(part.isfinite().all()) for part in sample):
                raise InputError(f"sample {count} of the data holds NaN or infinity: leave it out, or mend it")
            yield sample
            count += 1


def _labelled(example: Call, data: Data) -> Iterator[tuple[tuple[torch.Tensor, ...], int]]:
    """Samples with the label that stands behind the inputs in every batch."""
    inputs = len(example.tensors)
    batches = [data] if isinstance(data, tuple) and all(isinstance(part, torch.Tensor) for part in data) else data
    if not isinstance(batches, (Iterable, Dataset)):
        raise InputError(f"data must be (inputs, labels) or an iterable of such batches, got {type(data).__name__}")
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) <= inputs or not isinstance(batch[inputs], torch.Tensor):
            raise InputError("certified radii need labels: pass (inputs, labels) or batches of them")
        labels = batch[inputs]
        counted = not labels.is_complex() and labels.dtype != torch.bool and bool((labels == labels.round()).all())
        if labels.dim() != 1 or len(labels) != len(batch[0]) or not counted:
            raise InputError(
                f"labels must be whole numbers, one per sample, got {labels.dtype} of shape {tuple(labels.shape)} "
                f"for {len(batch[0])} samples"
            )
        for index, sample in enumerate(_samples(example, tuple(batch[:inputs]))):
            yield sample, int(labels[index])
