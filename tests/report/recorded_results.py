"""A result of every kind that a report shows, as its command writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normscope as ns
from normscope.auditing import Audit
from normscope.bounds.generalization import Guarantees
from normscope.curvature.spectrum import Curvature

TINY = {"networks": '{"mlp":{"width":8,"depth":3}}', "epochs": "1", "images": "100"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def an_audit() -> Audit:
    return ns.audit(model().eval(), data(8, 0)[0], effort=0.2)


def some_guarantees() -> Guarantees:
    only = ["held-out Hoeffding", "held-out binomial", "Golowich et al. 2018"]
    return ns.generalization(model().eval(), "zero-one", data(200, 0), held_out=data(100, 1), select=only)


def a_curvature(quotient: bool) -> Curvature:
    inputs, classes = data(32, 0)
    found = ns.hessian(model().double(), nn.functional.cross_entropy, (inputs.double(), classes), quotient=quotient)
    found.top(3), found.bottom(1), found.trace(), found.condition(), found.density(probes=2, steps=8)
    return found


def results_of_every_kind(lab: Path) -> dict[str, Any]:
    """lab: a directory for an experiment."""
    audit = an_audit()
    texts = {
        "audit": audit.to_json(),
        "doctor": audit.findings.to_json(),
        "curvature": json.dumps([a_curvature(quotient).to_dict() for quotient in (False, True)]),
        "generalization": json.dumps(some_guarantees().to_dict(), allow_nan=False),
        "claims": ns.claims.run_claims(["T-T13", "A-WD"]).to_json(),
        "lab": ns.lab.run_experiment("weight-norms", settings=TINY, out=lab).to_json(),
    }
    return {name: json.loads(text) for name, text in texts.items()}
