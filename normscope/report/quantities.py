"""What the columns of a run are called in pictures and words, and in which unit they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """title: for a heading. unit: for an axis, in brackets. signed: whether zero is the middle of its scale."""

    title: str
    unit: str = ""
    signed: bool = False

    @property
    def words(self) -> str:
        """The title within a sentence."""
        return self.title[:1].lower() + self.title[1:]

    @property
    def axis(self) -> str:
        return f"{self.title} [{self.unit}]" if self.unit else self.title


QUANTITIES = {
    "loss": Quantity("Loss"),
    "accuracy": Quantity("Accuracy"),
    "learning_rate": Quantity("Learning rate"),
    "loss_scale": Quantity("Loss scale of mixed precision"),
    "overhead": Quantity("Recording's share of the time"),
    "total_gradient_norm": Quantity("Norm of all gradients"),
    "losses_read": Quantity("Losses read"),
    "gradients_read": Quantity("Steps whose gradients were read"),
    "samples": Quantity("Sampled steps"),
    "sharpness": Quantity("Sharpness λ_max on the probe batch"),
    "gradient_predictiveness": Quantity("Change of the gradient along a step"),
    "jacobian_norm": Quantity("Norm of the Jacobian on the probe batch"),
    "log10_weight_product": Quantity("∏ ‖W‖ over weights", "decades", signed=True),
    "log10_gain_tight": Quantity("∏ gain, tight: max |γ|/σ", "decades", signed=True),
    "log10_gain_paper": Quantity("∏ gain, paper: ‖1/σ‖", "decades", signed=True),
    "log10_gain_paper_affine": Quantity("∏ gain, paper with γ: ‖γ/σ‖", "decades", signed=True),
    "log10_gain_layer": Quantity("∏ 1/σ, one σ per layer", "decades", signed=True),
    "spectral_norm": Quantity("Spectral norm ‖W‖"),
    "spectral_residual": Quantity("Residual of the spectral norm"),
    "frobenius_norm": Quantity("Frobenius norm ‖W‖_F"),
    "gamma_min": Quantity("Least γ", signed=True),
    "gamma_max": Quantity("Greatest γ", signed=True),
    "beta_min": Quantity("Least β", signed=True),
    "beta_max": Quantity("Greatest β", signed=True),
    "input_variance": Quantity("Variance of the input"),
    "input_variance_min": Quantity("Least variance of the input"),
    "input_variance_median": Quantity("Median variance of the input"),
    "input_variance_max": Quantity("Greatest variance of the input"),
    "largest_input": Quantity("Largest input max |x|"),
    "dead_fraction": Quantity("Dead channels", "share"),
    "running_shift": Quantity("Shift of batch from running mean", "σ"),
    "running_divergence": Quantity("Batch against running variance, mean |ln ratio|"),
    "batch_size": Quantity("Samples per batch"),
    "gain_tight": Quantity("Gain, tight: max |γ|/σ"),
    "gain_paper": Quantity("Gain, paper: ‖1/σ‖"),
    "gain_paper_affine": Quantity("Gain, paper with γ: ‖γ/σ‖"),
    "gain_layer": Quantity("Gain 1/σ, one σ per layer"),
    "gradient_norm": Quantity("Gradient norm ‖g‖"),
    "gradient_dot_weight": Quantity("Gradient along the weight ⟨g, w⟩", signed=True),
    "update_norm": Quantity("Length of the step ‖Δ‖"),
    "update_dot_weight": Quantity("Step along the weight ⟨Δ, w⟩", signed=True),
    "update_ratio": Quantity("Relative step ‖Δ‖/‖w‖"),
    "angle": Quantity("Rotation per step", "rad"),
    "radial_gradient": Quantity("Radial part of the gradient ⟨g, w⟩/(‖g‖‖w‖)", signed=True),
    "effective_lr": Quantity("Effective learning rate"),
    "input_p99": Quantity("99th percentile of |x|"),
    "massive_channels": Quantity("Channels with massive activations", "share"),
    "rms_to_max_norm": Quantity("Largest output for inputs of root mean square 1"),
    "equilibrium_angle": Quantity("Rotation per step predicted in equilibrium", "rad"),
    "effective_lr_spread": Quantity("Largest over smallest effective learning rate"),
    "update_rms": Quantity("Root mean square of the step"),
    "stream_rms": Quantity("Root mean square of the residual stream"),
    "write_ratio": Quantity("What a block adds ‖F(x)‖/‖x‖"),
    "backward_gain": Quantity("Gain of the backward pass ‖dx‖/‖dy‖"),
    "attention_logit": Quantity("Largest attention logit"),
    "attention_entropy": Quantity("Least entropy of an attention head", "of uniform"),
    "gamma_moved": Quantity("Entries of γ that moved since the last sample", "share"),
    "gamma_moved_from_start": Quantity("Entries of γ that moved since the start", "share"),
    "differing_ranks": Quantity("Replicated parameters that differ between ranks"),
}


def quantity(column: str) -> Quantity:
    """What a column is called; a trend is its product's slope, a column of another version its own name."""
    if column.endswith("_trend"):
        return Quantity(f"Trend of {quantity(column.removesuffix('_trend')).title}", "decades per step", signed=True)
    return QUANTITIES.get(column, Quantity(column))
