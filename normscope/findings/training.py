"""NS3xx: how an optimizer and a training set-up treat normalizers and what they make scale-free."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normscope.curvature.landscape import landscape
from normscope.findings.streams import SMALL_BATCH
from normscope.findings.subject import Subject
from normscope.findings.table import Hit, rule

STRONG_DECAY = 0.05  # lr · weight decay per step: the direction turns by 0.3 radians, a new one every ten steps
BEYOND = 2.0  # times the measured stable rate
LEAVE = "Leave it: linear layers alone read these γ, and decay on them is reported to help (Wang et al. 2026)."
SAMPLES = 256  # of the data, to measure it
HALF = (torch.float16, torch.bfloat16)
ADAPTIVE = ("adam", "lion")  # in the names of optimizers whose steps are about lr


def _groups(subject: Subject) -> Iterator[tuple[dict, dict[int, str]]]:
    """Parameter groups of the optimizer with the names of the model's parameters in them."""
    assert subject.optimizer is not None
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}
    for group in subject.optimizer.param_groups:
        yield group, {id(p): names[id(p)] for p in group["params"] if id(p) in names}


@rule(
    "NS301", "weight decay on γ, β or biases", "warning",
    fix="Put them in a parameter group of their own with weight_decay=0 (`.optimizer_for(model)` does); γ then grows more freely, "
        "so retune the learning rate if γ had shrunk.",
    reference="Goyal et al. 2017, section 3; He et al. 2019; for γ by placement Wang et al. 2026 (arXiv 2605.26895)",
    needs=("optimizer",),
)  # fmt: skip
def decayed_scales(subject: Subject) -> Iterator[Hit]:
    """Weight decay is meant to limit the size of weights. On β and on the γ of an output norm, whose output is added to a stream or
    enters an activation, it shrinks what the normalizer is to restore; on biases it does not limit capacity and slows fitting.
    The γ of an input norm, which linear layers alone read, could be a part of their weights: there decay takes no
    expressivity away and is reported to help, so it is information only."""
    hurt = harmed_by_decay(subject)
    for group, names in _groups(subject):
        decay = group.get("weight_decay", 0)
        if not decay:
            continue
        harmed = [name for name in names.values() if name in hurt]
        helped = [name for name in names.values() if name in subject.input_scales]
        if harmed:
            kinds = "γ" if subject.graph is None else "γ of output norms"
            yield Hit("", f"weight decay {decay:g} acts on {len(harmed)} parameters ({kinds}, β or biases), such as {harmed[0]}",
                      {"weight_decay": decay, "parameters": len(harmed)})  # fmt: skip
        if helped:
            yield Hit("", f"weight decay {decay:g} acts on {len(helped)} γ of input norms, such as {helped[0]}",
                      {"weight_decay": decay, "parameters": len(helped)}, severity="info", fix=LEAVE)  # fmt: skip


def harmed_by_decay(subject: Subject) -> set[str]:
    """γ of output norms, β and biases, by name."""
    biases = {name for name, _ in subject.model.named_parameters() if name.rpartition(".")[2] == "bias"}
    return (biases | set(subject.normalizer_parameters)) - subject.input_scales


@rule(
    "NS302", "batches too small for batch statistics", "warning",
    fix="Use larger batches per device, SyncBatchNorm, or a normalizer that does not depend on the batch "
        '(`.apply(select=["NS302"])` puts GroupNorm in its place, which then has to be trained, at a learning rate of its own).',
    reference="Wu & He 2018, figure 1", needs=("batch size",),
)  # fmt: skip
def small_batches(subject: Subject) -> Iterator[Hit]:
    """Statistics of a few samples are noisy estimates: training sees one function per batch, the running statistics describe
    none of them, and accuracy falls steeply below about eight samples per device. A batch of one with 1×1 maps fails outright."""
    if subject.micro_batch is not None:
        sizes = [subject.micro_batch]
    elif isinstance(subject.data, (torch.Tensor, tuple)):  # all of the data, not in batches of the training's
        return
    else:
        sizes = [call.batch_size for call in subject.batches()]
    typical = sorted(sizes)[len(sizes) // 2]
    if subject.batch_norms and typical < SMALL_BATCH:
        first = next(iter(subject.batch_norms))
        yield Hit(first, f"{len(subject.batch_norms)} batch normalizers see batches of {typical}",
                  {"batch_size": typical, "layers": len(subject.batch_norms)},
                  severity="error" if typical == 1 else "")  # fmt: skip


@rule(
    "NS303", "no weight decay on scale-free weights", "info",
    fix="Give them weight decay, or an optimizer that keeps their norm (ns.optim.SGDG, AdamG, SGDP, AdamP). Either changes the "
        "effective learning rate: retune lr and its schedule; the best lr of AdamW is not that of AdamP or AdamG.",
    reference="van Laarhoven 2017; Heo et al. 2021", needs=("optimizer", "symmetries"),
)  # fmt: skip
def ever_slower(subject: Subject) -> Iterator[Hit]:
    """The gradient of a scale-free weight is orthogonal to it, so every step makes the weight longer and its effective learning
    rate, lr/‖w‖² for SGD and lr/‖w‖ for Adam, smaller, for ever. Weight decay balances this."""
    free = set(subject.scale_free)
    for group, names in _groups(subject):
        held = [name for name in names.values() if name in free]
        if held and not group.get("weight_decay", 0) and not type(subject.optimizer).__module__.startswith("normscope"):
            yield Hit("", f"{len(held)} scale-free weights such as {held[0]} have no weight decay", {"weights": len(held)})


@rule(
    "NS304", "weight decay so strong that scale-free weights oscillate", "warning",
    fix="Lower the learning rate or the weight decay until their product is below 0.01. The effective learning rate follows the "
        "product: retune the schedule with it.",
    reference="Wan et al. 2021 (spherical motion dynamics)", needs=("optimizer", "symmetries"),
)  # fmt: skip
def strong_decay(subject: Subject) -> Iterator[Hit]:
    """At equilibrium a scale-free weight turns by about √(2 · lr · decay) radians per step. Beyond a few hundredths for the product
    the direction is redrawn every few steps and training hovers instead of converging."""
    free = set(subject.scale_free)
    for group, names in _groups(subject):
        rate = float(group.get("lr", 0)) * float(group.get("weight_decay", 0))
        held = [name for name in names.values() if name in free]
        if held and rate > STRONG_DECAY:
            yield Hit("", f"lr · weight decay = {rate:.3g} turns {len(held)} scale-free weights by about "
                          f"{math.sqrt(2 * rate):.2f} radians per step", {"product": rate, "weights": len(held)})  # fmt: skip


@rule(
    "NS305", "an optimizer that does not hold a normalizer's parameters", "warning",
    fix="Add them to the optimizer, or freeze them with requires_grad_(False).",
    reference="torch.optim", needs=("optimizer",),
)  # fmt: skip
def forgotten_parameters(subject: Subject) -> Iterator[Hit]:
    """Trainable γ and β that no parameter group holds stay at their initial values while everything else moves: a common slip
    when parameter groups are built by module type."""
    if missing := subject.forgotten:
        yield Hit(missing[0].rpartition(".")[0], f"{len(missing)} trainable normalizer parameters such as {missing[0]} are in no "
                  "parameter group", {"parameters": len(missing)})  # fmt: skip


@rule(
    "NS306", "batch statistics under data parallelism without synchronisation", "warning",
    fix="torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a normalizer that does not depend on the batch.",
    reference="torch.nn.SyncBatchNorm",
)  # fmt: skip
def unsynchronised(subject: Subject) -> Iterator[Hit]:
    """Under DistributedDataParallel each process normalizes by its own part of the batch and keeps its own running statistics;
    only those of rank 0 are saved."""
    parallel = isinstance(subject.model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    plain = [path for path, module in subject.batch_norms.items() if not isinstance(module, nn.SyncBatchNorm)]
    if plain and (parallel or several):
        yield Hit(plain[0], f"{len(plain)} batch normalizers use the statistics of one process", {"layers": len(plain)})


@rule(
    "NS307", "running statistics in half precision", "error",
    fix="Keep normalizers in float32 (`.apply()` does it).",
    reference="Micikevicius et al. 2018, section 4",
)  # fmt: skip
def half_statistics(subject: Subject) -> Iterator[Hit]:
    """A running average in half precision stops moving once the update is below its resolution (three digits in bfloat16), and
    squares of activations overflow float16 beyond 256: variances come out wrong or infinite."""
    for path, module in subject.batch_norms.items():
        if module.running_var is not None and module.running_var.dtype in HALF:
            yield Hit(path, f"its running statistics are {str(module.running_var.dtype).removeprefix('torch.')}")


@rule(
    "NS308", "frozen statistics around trainable weights", "info",
    fix="Let the statistics follow (train mode), or freeze the weights before them too.",
    reference="Wu & Johnson 2021, section 3",
)  # fmt: skip
def stale_statistics(subject: Subject) -> Iterator[Hit]:
    """If all batch normalizers are in eval mode while the model trains and the weights before them move, the running statistics
    describe activations that no longer exist, and nothing normalizes."""
    modules = list(subject.batch_norms.values())
    moving = any(p.requires_grad for name, p in subject.model.named_parameters() if name not in subject.normalizer_parameters)
    if modules and subject.model.training and moving and not any(module.training for module in modules):
        yield Hit(next(iter(subject.batch_norms)), f"all {len(modules)} batch normalizers are in eval mode while the model trains",
                  {"layers": len(modules)})  # fmt: skip


@rule(
    "NS310", "a learning rate outside the stable range", "warning",
    fix="Lower the learning rate below the measured one, or normalize: that widens the range. With another lr, retune weight "
        "decay: their product is what counts for scale-free weights.",
    reference="Bjorck et al. 2018; Cohen et al. 2021", needs=("labels", "optimizer"),
)  # fmt: skip
def unstable_rate(subject: Subject) -> Iterator[Hit]:
    """Gradient descent on a loss of curvature λ diverges beyond a rate of 2/λ. The doctor measures the largest rate at which some
    steps on a copy of the model do not raise the cross-entropy of the data. Plain SGD, with momentum counted as lr/(1 − α),
    should stay below it. Adaptive optimizers have no such limit and are not judged."""
    assert isinstance(subject.data, tuple)
    inputs, labels = subject.data[: len(subject.call.tensors)], subject.data[len(subject.call.tensors)]
    if not isinstance(subject.optimizer, torch.optim.SGD) or labels.dtype != torch.long or len(inputs) != 1:
        return
    batch = (inputs[0][:SAMPLES], labels[:SAMPLES])
    stable = landscape(subject.model, subject.cross_entropy, batch).largest_stable_rate()
    for group in subject.optimizer.param_groups:
        rate = float(group["lr"]) / (1 - float(group["momentum"]))
        if rate > BEYOND * stable:
            yield Hit("", f"lr/(1 − momentum) = {rate:.3g}, and gradient descent is stable up to {stable:.3g}",
                      {"rate": rate, "largest_stable_rate": stable})  # fmt: skip


@rule(
    "NS311", "batch statistics under gradient accumulation", "warning",
    fix="Use a normalizer that does not depend on the batch (`.apply(select=[\"NS311\"])` puts GroupNorm in its place, "
        "which then has to be trained), or larger micro-batches; the best learning rate changes with either.",
    reference="Wu & Johnson 2021", needs=("accumulation",),
)  # fmt: skip
def accumulated_statistics(subject: Subject) -> Iterator[Hit]:
    """Accumulating gradients makes the optimizer's batch larger, not BN's: each micro-batch is normalized by its own statistics,
    and running statistics are updated once per micro-batch, so the trained function is that of the small batches."""
    parts = subject.accumulation or 1
    if parts > 1 and subject.batch_norms:
        count = len(subject.batch_norms)
        yield Hit(next(iter(subject.batch_norms)), f"{count} batch normalizers see 1/{parts} of what a step is made of",
                  {"micro_batches": parts, "layers": count})  # fmt: skip


@rule(
    "NS312", "γ that its type cannot move", "error",
    fix="Train in float32 with autocast, keep the normalizers in float32 (`.apply()` does it), or use an optimizer with float32 "
        "master copies. γ then moves for the first time: check the learning rate once more.",
    reference="speculators #765, flame #47, axolotl #3670", needs=("optimizer",),
)  # fmt: skip
def immovable_scale(subject: Subject) -> Iterator[Hit]:
    """A step of Adam or its like changes an entry by about the learning rate. Where that is less than half of the distance to the
    next number of the entry's type, the result is rounded back and the entry never moves: in bfloat16 next to 1 everything
    below 0.002. Optimizers that hold a float32 copy of the parameters are not concerned: one whose state has a float32 tensor that
    rounds to the parameter is not reported."""
    assert subject.optimizer is not None
    own = {id(parameter): name for name, parameter in subject.normalizer_parameters.items()}
    stuck: list[tuple[str, float, float]] = []
    for group, _ in _groups(subject) if _steps_of_lr(subject.optimizer) else ():
        for parameter in group["params"]:
            if (
                id(parameter) in own
                and parameter.dtype in HALF
                and parameter.numel()
                and not _has_master(subject.optimizer, parameter)
            ):
                sizes = parameter.detach().abs().float()
                gap = float((sizes * torch.finfo(parameter.dtype).eps / 4).median())  # half of the distance to the next below 2^k
                if float(group["lr"]) < gap:
                    stuck.append((own[id(parameter)], float(group["lr"]), gap))
    if stuck:
        name, rate, gap = stuck[0]
        kind = str(subject.normalizer_parameters[name].dtype).removeprefix("torch.")
        yield Hit(name.rpartition(".")[0], f"a step of {rate:g} is rounded away in {kind}: {len(stuck)} parameters such as "
                  f"{name} move by {gap:.2g} or not at all", {"lr": rate, "least_step": gap, "parameters": len(stuck)})  # fmt: skip


def _steps_of_lr(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes an entry by about lr, whatever the gradient: Adam and its kin, of torch or of others, and Lion."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(known in name for name in names for known in ADAPTIVE)


def _has_master(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    state = optimizer.state.get(parameter, {})
    copies = (value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == parameter.shape)
    return any(copy.dtype == torch.float32 and torch.equal(copy.to(parameter.dtype), parameter.detach()) for copy in copies)
