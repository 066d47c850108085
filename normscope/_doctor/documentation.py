"""docs/doctor.md, made from the rules: `python -m normscope._doctor`."""

from __future__ import annotations

from normscope.findings.catalogue import RULES
from normscope.findings.table import GROUPS, FindingRule

INTRODUCTION = """\
# Doctor

What is wrong with the way a model uses normalization, and how do you fix it? `ns.doctor` examines the model, its weights, its data
and its training set-up, as far as you give them. Each finding comes with its evidence and its fix.

```python
findings = ns.doctor(model, example, optimizer=optimizer, data=(inputs, targets), run="runs/name")
print(findings)  # grouped by severity; then which checks ran, and which could not and why
model = findings.apply()  # a copy with every mechanical fix made; findings.repairs says what each changed in the output
optimizer = findings.optimizer_for(model)  # the same kind and settings, no weight decay where it harms
```

In a terminal, for pictures or token ids:

    normscope doctor models.py:net --input 3x32x32
    normscope doctor models.py:llm --input input_ids:16:int --optimizer adamw:lr=1e-3,weight_decay=0.1 --run runs/name

`--micro-batch` (samples per device and forward pass) and `--accumulation` (micro-batches per step) describe the training.
`--select`, `--ignore`, `--explain NS203`, `--baseline FILE` (known findings; `--write-baseline` makes it), `--json`, `--sarif`,
`--format github` and `--fail-on` (for the exit code) shape the output. A comment `# normscope: ignore NS101` beside the line that
makes a module silences a rule there.

The doctor never trains, and changes neither the model nor random state. It asks `ns.symmetries`, once, which weights are
scale-free (NS303, NS304). That takes minutes on a model of more than 100 million parameters or 2,000 modules. There, these two
rules run only with a report that you pass (`symmetries=ns.symmetries(model, example)`); the output lists them as not checked.

This page is made from the rules by `python -m normscope._doctor`; a test fails when it is stale.

## Repairs

| rule | `apply()` does | the output |
|---|---|---|
| NS101 | drops the bias and folds it into the running mean | stays |
| NS109 | removes the parametrization and keeps the weight | stays |
| NS201, NS205 | estimates running statistics anew on `data=` (`ns.recalibrate`, also after EMA, SWA, merging) | changes |
| NS206 | freezes the batch normalizer for good: `model.train()` does not wake it | stays |
| NS307, NS312 | keeps normalizers in float32 inside a half-precision model | changes by rounding |
| NS302, NS311 | GroupNorm with γ and β of BatchNorm, only with `apply(select=["NS302"])` | changes: train it |
| NS301, NS305 | `optimizer_for`: groups without decay, forgotten parameters added; retune the learning rate | stays |

`findings.repairs` has the measured change of the output, relative to its size, for each.

## How often it is right

`python -m bench doctor_mistakes` plants 108 mistakes in models from `transformers` configurations. `python -m bench
doctor_healthy DIR` examines healthy networks from `transformers` and `diffusers`, and trained ones. Results are in
[benchmarks](benchmarks.md).

Some findings about published architectures are surprising, and still true. MobileNetV2 and EfficientNet give BN a momentum of
0.997 and 0.99, which in torch is the weight of the *new* batch (NS207). EfficientNet draws γ around zero with a deviation of 0.02
when it is made from a configuration (NS202). `AdamW` on all parameters decays β and biases (NS301).
"""


def documentation() -> str:
    """The introduction, then one section per rule."""
    parts = [INTRODUCTION.rstrip()]
    for prefix, title in GROUPS.items():
        parts.append(f"## {title} ({prefix}xx)")
        parts += [_section(RULES[rule]) for rule in sorted(RULES) if rule.startswith(prefix)]
    return "\n\n".join(parts) + "\n"


def _section(check: FindingRule) -> str:
    needs = f" Needs: {', '.join(check.needs)}." if check.needs else ""
    title = f"### {check.id}: {check.title}"
    return f"{title}\n{check.severity.capitalize()}.{needs} {check.why}\n\n*Fix.* {check.fix}\n\n*Reference.* {check.reference}."
