"""NS2xx: what the stored numbers of normalizers say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from normscope.core.answers import right_answers
from normscope.core.twins import twin_of
from normscope.findings.finding import Evidence
from normscope.findings.subject import BatchNorm, Subject
from normscope.findings.table import Hit, rule
from normscope.findings.weights import HasWeights
from normscope.graph.graph import Constant
from normscope.operators.dense import spectral_norm
from normscope.rules.normalizers import leaving
from normscope.rules.readings import Activation
from normscope.rules.registry import registry

DEAD = 1e-4  # |γ| against the largest, below which a channel is switched off: trained γ are within a hundredfold
DOMINATED = 100.0  # largest gain against the median one
STOPPED = 0.5  # share of the variance that ε is, from which the normalizer hardly normalizes
FAR = 1.0  # distance of running and batch statistics, in standard deviations or in log variance
RUNNING = ("running_mean", "running_var")  # what NS201 judges
HALF = (torch.float16, torch.bfloat16)
USUAL_EPSILON = 1e-5  # of a normalizer in a file that does not say it
SLOW = 0.1  # share of the initial statistics that is still left
UNCONVERGED = 1.1  # true spectral norm against what power iteration takes for it
OFF = 4.0  # deviations that β lies below zero
DRAWN = 0.25  # size of the mean of all γ against their root mean square, at most, where they were drawn around zero


@rule(
    "NS201", "running statistics that no training has set", "error",
    fix="Recompute them: ns.recalibrate(model, data).",
    reference="Ioffe & Szegedy 2015, algorithm 2", needs=("weights",),
)  # fmt: skip
def unset_statistics(subject: HasWeights) -> Iterator[Hit]:
    """In eval mode BN divides by its running variance. If that is NaN, zero, or still the initial 1 although the layer's own
    parameters were trained, the model that is evaluated is not the model that was trained."""
    trained = _trained(subject)
    for path, stored in subject.weights.normalizers().items():
        variance, mean = stored.running_var, stored.running_mean
        if variance is None or mean is None:
            continue
        if not bool(variance.isfinite().all() and mean.isfinite().all()):
            yield Hit(path, "its running statistics are not finite", {"channels": int((~variance.isfinite()).sum())})
        elif bool((variance <= 0).any()):
            dead = int((variance <= 0).sum())
            yield Hit(path, f"the running variance of {dead} channels is zero or negative", {"channels": dead}, severity="warning")
        elif bool((variance == 1).all() and (mean == 0).all()) and path in trained:
            yield Hit(path, "its running statistics are the initial ones, its γ and β are not")


def _moved(subject: HasWeights) -> set[str]:
    """Normalizers whose γ is not that of an initialization: most set it to one number, some draw it around zero."""
    held = subject.weights.normalizers()
    varied = {path: own.gamma.double().flatten() for path, own in held.items() if own.gamma is not None and _varies(own.gamma)}
    together = torch.cat([*varied.values()]) if varied else torch.zeros(1, dtype=torch.float64)
    drawn = abs(float(together.mean())) <= DRAWN * float(together.square().mean().sqrt())
    return set() if drawn else {*varied}


def _trained(subject: HasWeights) -> set[str]:
    """Normalizers whose γ or β are not those of an initialization."""
    held = subject.weights.normalizers()
    return _moved(subject) | {path for path, own in held.items() if own.beta is not None and bool((own.beta != 0).any())}


def _varies(values: torch.Tensor) -> bool:
    return bool((values != values.flatten()[:1]).any())


def _any_trained(subject: HasWeights) -> bool:
    """Whether something says that the weights are not those of an initialization."""
    return subject.weights.trained or bool(_trained(subject))


@rule(
    "NS202", "collapsed or negative γ", "info",
    fix="Prune the channels that are off; look for weight decay on γ (NS301).",
    reference="Liu et al. 2017 (network slimming)", needs=("weights",),
)  # fmt: skip
def collapsed_scale(subject: HasWeights) -> Iterator[Hit]:
    """A channel whose γ is zero is switched off for good where a ReLU follows, and carries no information anyway. A few are
    common; many mean wasted width, or a weight decay that acts on γ. γ that is zero in all channels is also how the last
    normalizer of a residual branch starts, so by itself it is only information. Where the weights were trained, as the steps of
    an optimizer or of a running average show, or other normalizers that have moved, the branch is dead. Negative γ flips a
    channel and is rarely meant."""
    for path, stored in subject.weights.normalizers().items():
        if stored.gamma is None or not stored.gamma.numel() or not bool(stored.gamma.isfinite().all()):
            continue
        sizes = stored.gamma.abs().flatten().double()
        alive = sizes[sizes > DEAD * sizes.max()]
        dead = len(sizes) - len(alive)
        if dead:
            evidence: Evidence = {"dead": dead, "channels": len(sizes)}
            if dead < len(sizes):
                severity = "warning" if dead > len(sizes) / 4 else ""
                yield Hit(path, f"γ of {dead} of {len(sizes)} channels has collapsed", evidence, severity=severity)
            else:
                message = f"γ of all {len(sizes)} channels is zero: nothing of its input passes"
                yield Hit(path, message, evidence, severity="warning" if _any_trained(subject) else "")
        negative = int((stored.gamma < 0).sum())
        if negative > len(sizes) / 4:
            yield Hit(path, f"γ of {negative} of {len(sizes)} channels is negative", {"negative": negative, "channels": len(sizes)})


@rule(
    "NS203", "ε out of proportion", "warning",
    fix="Lower ε below a hundredth of the variance; for half precision keep it above the smallest normal number.",
    reference="Arora, Li & Lyu 2019; the defect of scale invariance is ε/(σ² + ε)",
)  # fmt: skip
def epsilon_out_of_proportion(subject: Subject) -> Iterator[Hit]:
    """Where ε is as large as the variance it is added to, the normalizer has stopped normalizing: it scales by a constant, and
    scale invariance is gone. Where ε is below the resolution of the type that the statistics are computed in, it is zero, and
    a constant channel gives NaN."""
    for path, module in subject.torch_normalizers.items():
        epsilon = module.eps
        dtype = module.weight.dtype if module.weight is not None else None
        if epsilon is not None and dtype == torch.float16 and epsilon < torch.finfo(torch.float16).smallest_normal:
            yield Hit(path, f"ε = {epsilon:g} is below the smallest normal float16", {"epsilon": epsilon})
        variance = getattr(module, "running_var", None)
        if epsilon is None or variance is None or not bool(variance.isfinite().all()):
            continue
        typical = float(variance.median())
        if typical > 0 and epsilon > STOPPED * (typical + epsilon):
            yield Hit(
                path, f"ε = {epsilon:g} outweighs the median variance {typical:.3g}", {"epsilon": epsilon, "variance": typical}
            )


@rule(
    "NS204", "a gain that a few dead channels dominate", "warning",
    fix="Prune or reset the channels with almost no variance, or raise ε for this layer.",
    reference="Than 2025, Lemma 1, with the maximum instead of the norm", needs=("weights",),
)  # fmt: skip
def dominated_gain(subject: HasWeights) -> Iterator[Hit]:
    """The Lipschitz gain of BN in eval mode is max |γ|/√(v + ε). A channel whose input hardly varied in training has a tiny v
    and so an enormous gain: the certified bound, and the sensitivity to inputs unlike the training data, hang on it."""
    for path, stored in subject.weights.normalizers().items():
        variance = stored.running_var
        if variance is None or not bool(variance.isfinite().all() and (variance >= 0).all()) or len(variance) < 4:
            continue
        epsilon = USUAL_EPSILON if stored.epsilon is None else stored.epsilon
        gains = (variance.double() + epsilon).rsqrt() * (1 if stored.gamma is None else stored.gamma.double().abs())
        largest, typical = float(gains.max()), float(gains.median())
        if typical > 0 and largest > DOMINATED * typical:
            count = int((gains > DOMINATED * typical).sum())
            yield Hit(path, f"{count} of {len(gains)} channels have a gain {largest / typical:.0f} times the median",
                      {"largest_gain": largest, "median_gain": typical, "channels": count})  # fmt: skip


@rule(
    "NS205", "running statistics far from those of the data", "warning",
    fix="Recompute the statistics on this data, or find why it differs from the training data (preprocessing, augmentation).",
    reference="Ioffe 2017; Summers & Dinneen 2020", needs=("data",),
)  # fmt: skip
def statistics_gap(subject: Subject) -> Iterator[Hit]:
    """In eval mode BN trusts its running statistics. Where the data's own mean or variance is far from them, the layers behind
    see inputs that they were not trained on. With labels the finding says what the gap costs in accuracy."""
    hits = []
    for path, module in subject.batch_norms.items():
        seen = subject.entering[path]
        if module.running_var is None or not seen.count or not bool((module.running_var > 0).all()) or _unset(module):
            continue
        variance = module.running_var.double() + module.eps
        shift = float(((seen.mean - module.running_mean.double()).abs() * variance.rsqrt()).median())
        stretch = float(((seen.variance + module.eps) / variance).log().abs().median())
        if max(shift, stretch) > FAR:
            hits.append(Hit(path, "the data's statistics are far from its running ones",
                            {"median_shift_in_deviations": shift, "median_log_variance_ratio": stretch}))  # fmt: skip
    if hits and subject.labelled:
        stored, fresh = accuracy(subject, batch_statistics=False), accuracy(subject, batch_statistics=True)
        yield Hit(hits[0].where, f"accuracy is {stored:.1%} with running and {fresh:.1%} with batch statistics",
                  {"accuracy_running": stored, "accuracy_batch": fresh, "layers": len(hits)},
                  severity="error" if fresh - stored > 0.05 else "info")  # fmt: skip
    yield from hits


def _unset(module: Any) -> bool:
    """Whether its statistics are, for a good part, still those that it was made with: NS201 and NS207 are about these."""
    if bool((module.running_var == 1).all() and (module.running_mean == 0).all()):
        return True
    steps = module.num_batches_tracked
    return steps is not None and int(steps) > 0 and initial_share(module.momentum, int(steps)) > SLOW


def initial_share(momentum: float | None, steps: int) -> float:
    """How much of the initial running statistics is left after some batches; nothing where they are averages over all batches."""
    return 0.0 if momentum is None else float((1 - momentum) ** steps)


def accuracy(subject: Subject, batch_statistics: bool) -> float:
    """On the labelled data, with running or with batch statistics in every BN."""
    twin = twin_of(subject.model).eval()
    for module in twin.modules():
        if isinstance(module, BatchNorm):
            module.train(batch_statistics)
    assert isinstance(subject.data, tuple)
    labels = subject.data[len(subject.call.tensors)]
    right = total = 0
    with torch.no_grad():
        for call in subject.batches():
            outputs = subject.chosen(twin(*call.args, **call.kwargs))
            if outputs.dim() != 2:
                return float("nan")
            part = labels[total : total + len(outputs)]
            right, total = right + int(right_answers(outputs, part).sum()), total + len(outputs)
    return right / max(total, 1)


@rule(
    "NS206", "a batch normalizer that is half frozen", "warning",
    fix="Freeze both or neither: module.eval() and requires_grad_(False) together (`.apply()` stops the gradient).",
    reference="Wu & Johnson 2021, section 3",
)  # fmt: skip
def half_frozen(subject: Subject) -> Iterator[Hit]:
    """A BN whose γ and β are fixed but which is in train mode still changes its running statistics and still mixes the samples
    of a batch; one in eval mode with trainable γ and β is no longer normalizing while its parameters drift."""
    modules = list(subject.batch_norms.items())
    training = {path for path, module in modules if module.training}
    for path, module in modules:
        parameters = [p for p in (module.weight, module.bias) if p is not None]
        if path in training and parameters and not any(p.requires_grad for p in parameters):
            yield Hit(path, "γ and β are frozen, but it is in train mode and keeps updating its statistics")
        if path not in training and training and any(p.requires_grad for p in parameters):
            yield Hit(path, "it is in eval mode while others train, but its γ and β are trainable")


@rule(
    "NS207", "a momentum that never converges", "error",
    fix="Use a momentum between 0.01 and 0.5, or None for a cumulative average.",
    reference="torch.nn.BatchNorm2d",
)  # fmt: skip
def idle_momentum(subject: Subject) -> Iterator[Hit]:
    """Running statistics move by `momentum` of the way to the batch's at each step. With 0 they never move, with 1 they are the
    last batch's, and with a small one and few steps the initial values still count when training ends. (torch's momentum is the
    weight of the new value; other frameworks mean the weight of the old one, so 0.99 is a likely mistake in a port.)"""
    for path, module in subject.batch_norms.items():
        momentum, steps = module.momentum, module.num_batches_tracked
        if momentum is None or module.running_var is None:
            continue
        if momentum == 0 or momentum >= 0.9:
            effect = "its statistics never move" if momentum == 0 else "its statistics are almost only the last batch's"
            yield Hit(path, f"momentum {momentum:g}: {effect}", {"momentum": momentum})
        elif steps is not None and int(steps) > 0 and (left := initial_share(momentum, int(steps))) > SLOW:
            yield Hit(path, f"after {int(steps)} batches {left:.0%} of the initial statistics are left",
                      {"momentum": momentum, "batches": int(steps), "left": left}, severity="warning")  # fmt: skip


@rule(
    "NS208", "batch statistics in eval mode", "info",
    fix="Keep running statistics (track_running_stats=True), unless predictions may depend on the other samples of a batch.",
    reference="torch.nn.BatchNorm2d",
)  # fmt: skip
def batch_statistics_in_eval(subject: Subject) -> Iterator[Hit]:
    """Without running statistics a BN uses those of the batch in eval mode too: a prediction then depends on which other
    samples are in its batch, and a batch of one fails or gives a constant."""
    for path, module in subject.batch_norms.items():
        if module.running_var is None:
            yield Hit(path, "it has no running statistics, so predictions depend on the batch")


@rule(
    "NS209", "parameters or buffers that are not finite", "error",
    fix="Load weights from before training diverged.",
    reference="docs/audit.md", needs=("weights",),
)  # fmt: skip
def not_finite(subject: HasWeights) -> Iterator[Hit]:
    """A single NaN or infinity in a weight makes outputs NaN, whatever the input; in a normalizer, those of its channel. A mask of
    zeros and −∞, as attention adds to its logits, is meant to hold infinities and is not reported."""
    for name, tensor in subject.weights.tensors():
        if name.rpartition(".")[2] not in RUNNING and not _all_finite(tensor) and not _is_mask(tensor):
            bad = int((~tensor.isfinite()).sum())
            yield Hit(name.rpartition(".")[0], f"{bad} entries of {name} are NaN or infinite", {"entries": bad})


def _all_finite(tensor: torch.Tensor) -> bool:
    """A sum is finite only where every entry is, and far quicker than `isfinite`; that of finite entries may overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _is_mask(tensor: torch.Tensor) -> bool:
    return not tensor.is_complex() and bool(((tensor == 0) | (tensor == float("-inf"))).all())


@rule(
    "NS210", "γ that never moved in training", "warning",
    fix="Train γ in float32 (or with a float32 master copy), put it in the optimizer, and give it a gradient.",
    reference="speculators #765, flame #47, axolotl #3670", needs=("weights",),
)  # fmt: skip
def unmoved_scale(subject: HasWeights) -> Iterator[Hit]:
    """After training every γ has moved a little. One that is exactly 1 (or 0) in all entries was not trained: it was not in the
    optimizer, got no gradient, or each step was rounded away because its type is too coarse. Published models were ruined by the
    last. Where nothing says that the weights were trained, only a γ that stood still while others moved is reported. Where β is
    still exactly 0 too, rounding is not the cause, as every step from 0 is kept: the normalizer was frozen, or the model does not
    use it. Weights alone do not tell which, so this is only information."""
    scales = {path: stored.gamma for path, stored in subject.weights.normalizers().items() if stored.gamma is not None}
    scales = {path: gamma for path, gamma in scales.items() if gamma.numel() > 1}
    still = [path for path, gamma in scales.items() if bool((gamma == 1).all())]
    moved = len(_moved(subject))
    if not still or not (subject.weights.trained or moved):
        return
    betas = {path: stored.beta for path, stored in subject.weights.normalizers().items()}
    untouched = [path for path in still if (beta := betas[path]) is not None and not bool(beta.any())]
    for paths, what, severity in (
        ([path for path in still if path not in untouched], "γ is exactly 1", ""),
        (untouched, "γ is exactly 1 and β exactly 0: frozen, or not used by the model,", "info" if moved else ""),
    ):
        if paths:
            half = [path for path in paths if scales[path].dtype in HALF]
            kind = f", {len(half)} of them in {str(scales[half[0]].dtype).removeprefix('torch.')}" if half else ""
            counted: Evidence = {"still": len(paths), "normalizers": len(scales)}
            yield Hit(paths[0], f"{what} in {len(paths)} of {len(scales)} normalizers{kind}", counted, severity=severity)


@rule(
    "NS211", "ε as large as the variance on data", "warning",
    fix="Lower ε below a hundredth of the variance, or raise the scale of what enters (an embedding's or a branch's).",
    reference="Arora, Li & Lyu 2019; the defect of scale invariance is ε/(σ² + ε)", needs=("data",),
)  # fmt: skip
def epsilon_on_data(subject: Subject) -> Iterator[Hit]:
    """Layer, group and RMS normalizers divide by the deviation of their input. Where ε is as large as its variance (its mean
    square for RMS), they multiply by a constant and no longer normalize: a small embedding before an ε of 1e-5 is enough. The
    rule takes the median over tokens or groups of the data, and reports an ε that is at least half of what is divided by. Before
    training the scale is that of the initialization, which training changes. With an ordinary ε (at most 1e-5) this is then only
    information, and common in narrow networks and behind residual branches that begin small."""
    for path, (epsilon, typical) in subject.spreads.items():
        if epsilon > STOPPED * (typical + epsilon):
            first = epsilon <= USUAL_EPSILON and not _any_trained(subject)
            when = " before training" if first else ""
            yield Hit(path, f"ε = {epsilon:g} outweighs the median variance {typical:.3g} of what enters it on the data{when}",
                      {"epsilon": epsilon, "variance": typical}, severity="info" if first else "")  # fmt: skip


@rule(
    "NS212", "a spectral norm that has not converged", "warning",
    fix="Run some forward passes in train mode before you evaluate (each makes a step of the power iteration), and load its u and "
        "v with the weights.",
    reference="Miyato et al. 2018, algorithm 1",
)  # fmt: skip
def unconverged_spectral_norm(subject: Subject) -> Iterator[Hit]:
    """torch's spectral_norm divides a weight by uᵀWv, which is its norm only once power iteration has found u and v; in eval mode
    it makes no steps. Weights that were loaded or changed without their u and v have norms above the 1 that was asked for, and a
    bound that relies on that 1 does not hold. 15 steps, as torch begins, leave up to 6 % on random matrices; 10 % is reported."""
    for path, module in subject.model.named_modules():
        for weight, u, v, axis in _power_iterations(module):
            matrix = weight.detach().double().movedim(axis, 0).flatten(1)
            if not bool(matrix.isfinite().all()):  # NS209
                continue
            taken, actual = float(u.double() @ matrix @ v.double()), float(spectral_norm(matrix, slack=1e-3))
            if not actual <= UNCONVERGED * abs(taken):
                ratio = actual / abs(taken) if taken else float("inf")
                yield Hit(path, f"its weight has a spectral norm of {ratio:.3g} after normalization, not 1",
                          {"norm": ratio, "divided_by": taken})  # fmt: skip


def _power_iterations(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(weight as it is stored, u, v, its output axis) of every spectral norm on a module, in both of torch's forms."""
    if parametrize.is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            stored: Any = module.parametrizations[name]  # type: ignore[index,union-attr]
            if isinstance(first := stored[0], _SpectralNorm) and hasattr(first, "_v"):
                yield stored.original, first._u, first._v, first.dim
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            weight, u, v = (getattr(module, f"{hook.name}_{part}") for part in ("orig", "u", "v"))
            yield weight, u, v, hook.dim


@rule(
    "NS213", "channels that β switches off", "info",
    fix="Reset β of these channels, lower the learning rate of β, or use an activation with a slope everywhere.",
    reference="Lu et al. 2020 (dying ReLU)", needs=("graph",),
)  # fmt: skip
def dead_through_shift(subject: Subject) -> Iterator[Hit]:
    """Behind a normalizer a channel has mean β and deviation |γ|. Where β is below −4 |γ| and a rectifier follows, at most one
    value in 17 passes (Cantelli's inequality), and one in 30,000 if the channel is bell-shaped: it is off, gets no gradient and
    stays off. A few are common; from a quarter of the channels on it is a warning."""
    for node, normalizer in subject.normalizers:
        gamma, beta = normalizer.gamma, normalizer.beta
        readers = subject.readers[leaving(node, subject.readers)]
        if not isinstance(gamma, Constant) or not isinstance(beta, Constant) or gamma.shape != beta.shape or not readers:
            continue
        reads = [registry.reading(reader, Activation) for reader in readers]
        if not all(read is not None and read.off_below for read in reads):
            continue
        sizes = gamma.double().abs()
        off = int(((beta.double() < -OFF * sizes) & (sizes > DEAD * sizes.max())).sum())
        if off:
            severity = "warning" if off > sizes.numel() / 4 else ""
            behind = readers[0].path or readers[0].op
            message = f"β keeps {off} of {sizes.numel()} channels below zero, where {behind} is off"
            yield Hit.at(node, message, severity, off=off, channels=sizes.numel())
