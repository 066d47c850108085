"""What a recording says of itself: how much of the training it saw, and what that cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope._watch.recording import Watch


def account(watch: Watch) -> dict[str, Any]:
    """Steps, samples, readings and cost so far; overhead is the share of the time since the densely sampled steps."""
    budget, probe, every = watch.budget, watch.options.probe, watch.every
    dense = budget.dense_cost / budget.dense_time if budget.dense_time else budget.overhead if budget.dense_now else 0.0
    return {
        "steps": watch.steps,
        "sampled_steps": watch.sampled_steps,
        "losses_read": every.losses_read if every is not None else 0,
        "gradients_read": every.gradients_read if every is not None else 0,
        "overhead": 0.0 if budget.dense_now else budget.overhead,
        "dense_steps": min(budget.dense, watch.steps),
        "dense_overhead": dense,
        "setup_seconds": budget.setup,
        "probe_seconds": probe.cost if probe is not None else 0.0,
    }


def in_words(watch: Watch) -> str:
    """One line for the end of a training."""
    found, budget = account(watch), watch.budget
    allowed = f"every {budget.every} steps" if budget.every else f"budget {100 * budget.share:g} %"
    shares = []
    if found["dense_steps"]:
        shares.append(f"{100 * found['dense_overhead']:.0f} % of the first {found['dense_steps']} steps")
    if not budget.dense_now:
        shares.append(f"{100 * found['overhead']:.2f} % {'after them ' if shares else ''}({allowed})")
    cost = ", ".join([*shares, f"{budget.total + budget.dense_cost:.2g} s in all"])
    failed = f"; not all of it is recorded: {watch.writer.failure}" if watch.writer.failed else ""
    return (
        f"normscope: {found['sampled_steps']} of {found['steps']} steps sampled, {found['losses_read']} losses and "
        f"{found['gradients_read']} gradient norms read; overhead {cost}, "
        f"set-up {found['setup_seconds']:.1f} s; findings: {len(watch.findings)}; {watch.run}{failed}"
    )
