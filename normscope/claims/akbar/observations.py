"""Akbar, Sections 5, 6 and 8: the four experiments and what is asserted about noise, rates and smoothness, in small.

Each is an experiment of the lab, which has it in full: `normscope lab run NAME`.
"""

from __future__ import annotations

import torch

from normscope.claims.claim import claim
from normscope.claims.observed import Alteration, Changes, as_measured, observation
from normscope.claims.verdicts import Ruling

FIVE_LAYERS = '{"mlp":{"width":48,"depth":5}}'
TOY_FLOW: Changes = {"degrees": "[90.0]"}
CONDITIONING: Changes = {"learning_rates": "[0.05]", "steps": "400"}
OTHERS: Changes = {**CONDITIONING, "normalizers": '["none","layer","weight"]'}
DECAYS: Changes = {"epochs": "30", "decays": "[0.0,0.001,0.01]"}
MARGINS: Changes = {"epochs": "130"}
BAD_INIT: Changes = {"scales": "[0.001,1.0,100.0]"}
SADDLE_ESCAPE: Changes = {"rest": "1000", "steps": "1500"}
LARGE_RATES: Changes = {"networks": FIVE_LAYERS, "learning_rates": "[0.03,0.1,0.3,1.0,3.0]", "epochs": "12", "patience": "2"}
SMOOTHNESS: Changes = {"networks": FIVE_LAYERS, "learning_rates": "[0.1]", "epochs": "8"}


@claim("A-E1")
def toy_flow(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`toy-flow`. A step adds η²‖∇L‖² ∝ η²/‖w‖² to ‖w‖²: the norm is kept where the start is large, not where it is small."""
    return observation("toy-flow", generator.initial_seed(), TOY_FLOW, stated)


@claim("A-E2")
def conditioning(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`conditioning`: the dense Hessian of a tiny network for regression; its numbers depend on ‖w‖, which BN leaves free.

    They differ from seed to seed by more than from the paper, so one seed says little: `normscope lab run conditioning --seeds 10`.
    """
    return observation("conditioning", generator.initial_seed(), CONDITIONING, stated)


@claim("A-S6-others")
def conditioning_of_others(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`conditioning` with LN and with WN in place of BN: the spread of the dense Hessian's eigenvalues, and iterations."""
    return observation("conditioning", generator.initial_seed(), OTHERS, stated)


@claim("A-S7.3-decay")
def decay_and_normalizer(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`decay-and-normalizer`: λ from 0 to 0.01 with BN and without, 300 digits. One seed says little: the lab has three."""
    return observation("decay-and-normalizer", generator.initial_seed(), DECAYS, stated)


@claim("A-E3")
def margins(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`margins`: a 50-20-1 ReLU network, trained to zero error on labels that no plane separates; margins are raw logits."""
    return observation("margins", generator.initial_seed(), MARGINS, stated)


@claim("A-E4")
def bad_initialization(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`bad-init`. The gradient is ∝ 1/‖w‖, so with BN a large start is slow rather than explosive, and a small one jumps first."""
    return observation("bad-init", generator.initial_seed(), BAD_INIT, stated)


@claim("A-noise")
def saddle_escape(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`saddle-escape`: two tanh neurons on tanh x₁ + tanh x₂, at rest with both equal; steps until the loss is 5 % lower."""
    return observation("saddle-escape", generator.initial_seed(), SADDLE_ESCAPE, stated)


@claim("A-large-lr")
def large_learning_rates(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`max-learning-rate`: a rate is stable where the loss ends below half of what it was; three-fold steps from 0.03 to 3."""
    return observation("max-learning-rate", generator.initial_seed(), LARGE_RATES, stated)


@claim("A-smooth")
def smoothness(generator: torch.Generator, stated: Alteration = as_measured) -> Ruling:
    """`smoothness`: after every epoch, the range of the loss and the change of the gradient over 0.5 to 4 steps."""
    return observation("smoothness", generator.initial_seed(), SMOOTHNESS, stated)
