"""From numbers to a verdict: every claim computes cases, and one of these functions decides what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, sqrt
from typing import Any

import torch

HOLDS, BOUND, FALSE, GAP, MEASURED = "holds", "holds as a bound", "false as stated", "does not follow", "measured"
HEDGED = "not so, but hedged"  # false or a gap, of a statement that its source does not state outright
VERDICTS = (HOLDS, BOUND, FALSE, GAP, HEDGED, MEASURED)
REFUTED = (FALSE, GAP, HEDGED)
TOLERANCE = 1e-6  # relative, in float64
ROUNDING = 1e-12  # relative: smaller numbers depend on the machine, and are shown as nothing
SHARP = 0.9999  # a bound that some instance reaches to this part is called sharp
STANDARD_ERRORS = 5  # that a mean of draws may be away from what is stated
SHRUNK = 0.9  # what a mutant of scale multiplies a bound by
NOT_SHARP = {"sharpness": f"not sharp here: × {SHRUNK:g} survives"}

Evidence = dict[str, float | int | bool | str]


@dataclass(frozen=True)
class Ruling:
    """What the numbers say.

    instance: the counterexample, or the instance that comes closest to a bound. confirmed: whether the corrected statement
    passed the same test, None where none was tried.
    """

    verdict: str
    evidence: Evidence
    instance: str = ""
    confirmed: bool | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """One instance: the value that the statement gives, the true one, and that of the corrected statement.

    scale: what an error is relative to, where it is more than the values (1 for cosines).
    """

    instance: str
    stated: torch.Tensor
    true: torch.Tensor
    corrected: torch.Tensor | None = None
    scale: float = 0.0

    @property
    def error(self) -> float:
        return self._distance(self.stated)

    @property
    def corrected_error(self) -> float:
        return 0.0 if self.corrected is None else self._distance(self.corrected)

    @property
    def ratio(self) -> float:
        """true / stated, of numbers."""
        return _ratio(self.true, self.stated)

    @property
    def corrected_ratio(self) -> float:
        return 0.0 if self.corrected is None else _ratio(self.true, self.corrected)

    def _distance(self, value: torch.Tensor) -> float:
        size = max(float(value.norm()), float(self.true.norm()), self.scale)
        distance = float((value - self.true).norm()) / size if size else 0.0
        return distance if isfinite(distance) else inf

    def __str__(self) -> str:
        if self.true.numel() > 1:
            return f"{self.instance}: relative error {self.error:.3g}"
        corrected = "" if self.corrected is None else f", corrected {self._shown(self.corrected)}"
        return f"{self.instance}: stated {self._shown(self.stated)}, true {self._shown(self.true)}{corrected}"

    def _shown(self, value: torch.Tensor) -> str:
        """What is rounding beside the others is 0, on every machine."""
        size = max(abs(float(self.stated)), abs(float(self.true)), self.scale)
        return "0" if isfinite(size) and abs(float(value)) <= ROUNDING * size else f"{float(value):.3g}"


def identity(cases: Sequence[Case], **evidence: float | int | str) -> Ruling:
    """stated = true in every case."""
    worst = max(cases, key=lambda case: case.error)
    verdict = HOLDS if worst.error <= TOLERANCE else FALSE
    tried = any(case.corrected is not None for case in cases)
    corrected = max(case.corrected_error for case in cases)
    found: Evidence = {"instances": len(cases), "largest error": worst.error}
    found |= {"largest error of the correction": corrected} if tried else {}
    return Ruling(verdict, found | evidence, _instance(verdict, worst), corrected <= TOLERANCE if tried else None)


def constant(cases: Sequence[Case], *, least: bool = False, **evidence: Any) -> Ruling:
    """A number, said to be equal to the stated one; a bound where that is only ever too large (`least`: too small)."""
    outcome = identity(cases, **evidence)
    one_sided = all(case.ratio >= 1 - TOLERANCE if least else case.ratio <= 1 + TOLERANCE for case in cases)
    return replace(outcome, verdict=BOUND) if outcome.verdict == FALSE and one_sided else outcome


def upper_bound(cases: Sequence[Case], **evidence: float | int | str) -> Ruling:
    """true ≤ stated in every case; `holds` where some case reaches it, `holds as a bound` where none does."""
    worst = max(cases, key=lambda case: case.ratio)
    verdict = FALSE if worst.ratio > 1 + TOLERANCE else HOLDS if worst.ratio >= SHARP else BOUND
    tried = any(case.corrected is not None for case in cases)
    corrected = max(case.corrected_ratio for case in cases)
    found: Evidence = {"instances": len(cases), "largest true/stated": worst.ratio}
    found |= {"largest true/corrected": corrected} if tried else {}
    found |= NOT_SHARP if worst.ratio * (1 - TOLERANCE) <= SHRUNK else {}
    return Ruling(verdict, found | evidence, _instance(verdict, worst), corrected <= 1 + TOLERANCE if tried else None)


def lower_bound(cases: Sequence[Case], **evidence: float | int | str) -> Ruling:
    """true ≥ stated in every case; `holds` where some case reaches it, `holds as a bound` where none does."""
    worst = min(cases, key=lambda case: case.ratio)
    verdict = FALSE if worst.ratio < 1 - TOLERANCE else HOLDS if worst.ratio <= 1 / SHARP else BOUND
    found: Evidence = {"instances": len(cases), "least true/stated": worst.ratio}
    found |= NOT_SHARP if worst.ratio > 1 / SHRUNK else {}
    return Ruling(verdict, found | evidence, _instance(verdict, worst))


@dataclass(frozen=True)
class Trial:
    """One draw of data in a setting: the stated bound and the true value; `corrected`: the bound of the corrected statement.

    terms: the parts of the bound by name, each of which is asked how far it could shrink.
    """

    setting: str
    bound: float
    true: float
    corrected: float | None = None
    terms: tuple[tuple[str, float], ...] = ()


def coverage(trials: Sequence[Trial], delta: float, proof: str, **evidence: float | int | str) -> Ruling:
    """A bound with probability 1 − δ: in no setting broken by more than a part δ of the trials, three standard errors allowed.

    proof: where it is proved, on which a verdict of `holds` rests; trials can only refute.
    """
    settings = _by_setting(trials)
    excess = {name: _excess([trial.true > trial.bound for trial in group], delta) for name, group in settings.items()}
    worst = max(excess, key=excess.__getitem__)
    verdict = FALSE if excess[worst] > 0 else HOLDS
    found: Evidence = {
        "settings": len(settings),
        "trials": len(trials),
        "broken": sum(t.true > t.bound for t in trials),
        "delta": delta,
        "rests on": _basis(verdict, proof),
    }
    found |= {
        f"{name} could be × {factor:.3g}": "not sharp here" if factor < SHRUNK else "sharp"
        for name, factor in least_factors(trials, delta).items()
    }
    confirmed = None
    if any(trial.corrected is not None for trial in trials):
        again = [[t.corrected is not None and t.true > t.corrected for t in group] for group in settings.values()]
        confirmed = all(_excess(group, delta) <= 0 for group in again)
        found["broken by the correction"] = sum(map(sum, again))
    trial = max(settings[worst], key=lambda trial: trial.true - trial.bound)
    example = f"{worst}: bound {trial.bound:.3g}, true value {trial.true:.3g}"
    return Ruling(verdict, found | evidence, example if verdict == FALSE else "", confirmed)


def least_factors(trials: Sequence[Trial], delta: float) -> dict[str, float]:
    """For each term of the bounds, the least factor in [0, 1] with which no setting is broken more often than δ allows."""
    worst: dict[str, float] = {}
    for group in _by_setting(trials).values():
        allowed = sum(_excess([True] * broken + [False] * (len(group) - broken), delta) <= 0 for broken in range(1, len(group) + 1))
        for index, (name, _) in enumerate(group[0].terms):
            sizes = [trial.terms[index][1] for trial in group]
            needed = sorted(
                ((1 - (trial.bound - trial.true) / size) if size else 0.0 for trial, size in zip(group, sizes, strict=True)),
                reverse=True,
            )
            worst[name] = max(worst.get(name, 0.0), needed[allowed] if allowed < len(needed) else 0.0)
    return worst


@dataclass(frozen=True, eq=False)
class DrawnMean:
    """A mean or a variance: the stated value, and independent draws whose mean it is."""

    instance: str
    stated: float
    draws: torch.Tensor

    @property
    def mean(self) -> float:
        return float(self.draws.mean())

    @property
    def standard_error(self) -> float:
        return float(self.draws.std()) / sqrt(len(self.draws))

    @property
    def distance(self) -> float:
        """From the stated value, in standard errors."""
        return abs(self.mean - self.stated) / self.standard_error

    def __str__(self) -> str:
        return f"{self.instance}: stated {self.stated:.3g}, mean of draws {self.mean:.3g} ± {self.standard_error:.1g}"


def expectation(estimates: Sequence[DrawnMean], proof: str, **evidence: float | int | str) -> Ruling:
    """Stated means, each within five standard errors of that of the draws; `proof` as for `coverage`."""
    worst = max(estimates, key=lambda estimate: estimate.distance)
    verdict = HOLDS if worst.distance <= STANDARD_ERRORS else FALSE
    found: Evidence = {"instances": len(estimates), "largest distance in standard errors": worst.distance}
    found["rests on"] = _basis(verdict, proof)
    return Ruling(verdict, found | evidence, str(worst) if verdict == FALSE else "")


def implication(cases: Sequence[Case], evidence: Evidence, least: bool = False) -> Ruling:
    """What the premises allow is at most (`least`: at least) what is stated; a case beyond it is a gap in the argument."""
    excess = {case: 1 / case.ratio if least and case.ratio else inf if least else case.ratio for case in cases}
    worst = max(cases, key=excess.__getitem__)
    verdict = GAP if excess[worst] > 1 + TOLERANCE else HOLDS
    return Ruling(verdict, {"instances": len(cases), **evidence}, str(worst) if verdict == GAP else "")


def weaker(first: Ruling, second: Ruling) -> Ruling:
    """Two checks of one claim: the verdict that is further from `holds`, the evidence of both."""
    worse = max(first, second, key=lambda outcome: (HOLDS, BOUND, GAP, FALSE).index(outcome.verdict))
    return replace(worse, evidence=first.evidence | second.evidence)


def presence(effects: dict[str, float], least: float, confirmed: bool | None = None, **evidence: float | int | str) -> Ruling:
    """An effect is claimed to be there: it is where some instance shows at least so much of it."""
    name, effect = max(effects.items(), key=lambda item: item[1])
    verdict = HOLDS if effect >= least else FALSE
    nothing = f"in {len(effects)} instances nothing beyond rounding is seen"
    seen = f"{name}: at most {effect:.3g} is seen" if effect > ROUNDING else nothing
    instance = seen if verdict == FALSE else ""
    return Ruling(verdict, {"instances": len(effects), "largest effect": effect, **evidence}, instance, confirmed)


def measured(theirs: str, agrees: bool, settings: str, **ours: float | int | str) -> Ruling:
    """An observation: the paper's figure, ours, and whether ours agrees with what the paper says."""
    return Ruling(MEASURED, {"theirs": theirs, **ours, "agrees": bool(agrees), "settings": settings})


def _basis(verdict: str, proof: str) -> str:
    return f"the proof in {proof}, which the draws do not refute" if verdict == HOLDS else "the draws, which refute it"


def _ratio(true: torch.Tensor, stated: torch.Tensor) -> float:
    if float(true) == float(stated):
        return 1.0
    ratio = float(true) / float(stated) if float(stated) > 0 else inf
    return inf if isnan(ratio) else ratio


def _by_setting(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    settings: dict[str, list[Trial]] = {}
    for trial in trials:
        settings.setdefault(trial.setting, []).append(trial)
    return settings


def _excess(broken: Sequence[bool], delta: float) -> float:
    """How far the broken part exceeds δ and three standard errors."""
    return sum(broken) / len(broken) - delta - 3 * sqrt(delta * (1 - delta) / len(broken))


def _instance(verdict: str, worst: Case) -> str:
    return str(worst) if verdict in (FALSE, BOUND) else ""
