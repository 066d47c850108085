"""Akbar, Sections 5, 6 and 8: the four experiments and what is asserted about noise, rates and smoothness, in small.

Each is an experiment of the lab, which has it in full: `normscope lab run NAME`.
"""

from __future__ import annotations

from normscope.claims.observed import Changes, observe

FIVE_LAYERS = '{"mlp":{"width":48,"depth":5}}'
CONDITIONING: Changes = {"learning_rates": "[0.05]", "steps": "400"}

observe(__name__, {
    "A-E1": (
        "toy-flow", {"degrees": "[90.0]"},
        ". A step adds η²‖∇L‖² ∝ η²/‖w‖² to ‖w‖²: the norm is kept where the start is large, not where it is small.",
    ),
    "A-E2": (
        "conditioning", CONDITIONING,
        ": the dense Hessian of a tiny network for regression; its numbers depend on ‖w‖, which BN leaves free.\n\n"
        "They differ from seed to seed by more than from the paper, so one seed says little: `normscope lab run conditioning "
        "--seeds 10`.",
    ),
    "A-S6-others": (
        "conditioning", {**CONDITIONING, "normalizers": '["none","layer","weight"]'},
        " with LN and with WN in place of BN: the spread of the dense Hessian's eigenvalues, and iterations.",
    ),
    "A-S7.3-decay": (
        "decay-and-normalizer", {"epochs": "30", "decays": "[0.0,0.001,0.01]"},
        ": λ from 0 to 0.01 with BN and without, 300 digits. One seed says little: the lab has three.",
    ),
    "A-E3": (
        "margins", {"epochs": "130"},
        ": a 50-20-1 ReLU network, trained to zero error on labels that no plane separates; margins are raw logits.",
    ),
    "A-E4": (
        "bad-init", {"scales": "[0.001,1.0,100.0]"},
        ". The gradient is ∝ 1/‖w‖, so with BN a large start is slow rather than explosive, and a small one jumps first.",
    ),
    "A-noise": (
        "saddle-escape", {"rest": "1000", "steps": "1500"},
        ": two tanh neurons on tanh x₁ + tanh x₂, at rest with both equal; steps until the loss is 5 % lower.",
    ),
    "A-large-lr": (
        "max-learning-rate",
        {"networks": FIVE_LAYERS, "learning_rates": "[0.03,0.1,0.3,1.0,3.0]", "epochs": "12", "patience": "2"},
        ": a rate is stable where the loss ends below half of what it was; three-fold steps from 0.03 to 3.",
    ),
    "A-smooth": (
        "smoothness", {"networks": FIVE_LAYERS, "learning_rates": "[0.1]", "epochs": "8"},
        ": after every epoch, the range of the loss and the change of the gradient over 0.5 to 4 steps.",
    ),
})  # fmt: skip
