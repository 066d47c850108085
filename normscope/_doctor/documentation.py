"""docs/doctor.md, made from the rules: `python -m normscope._doctor`."""

from __future__ import annotations

from normscope.findings.catalogue import RULES
from normscope.findings.table import GROUPS, Rule

INTRODUCTION = """\
# Doctor

```python
findings = ns.doctor(model, example, optimizer=optimizer, data=(inputs, targets), run="runs/name")
print(findings)  # grouped by severity; then which checks ran, and which could not and why
repaired = findings.apply()  # a copy with every mechanical fix made; findings.repairs says what each changed in the output
```

`normscope doctor MODEL --input 3x32x32` does the same in a terminal; `--select`, `--ignore`, `--explain NS203`, `--baseline FILE`
(known findings; `--write-baseline` makes it), `--json`, `--sarif`, `--format github`, and `--fail-on` for the exit code. A comment
`# normscope: ignore NS101` beside the line that makes a module silences a rule there. The doctor never trains and changes neither
the model nor random state. Which weights are scale-free it asks `ns.symmetries`, once; on a model of more than 100 million
parameters or 2,000 modules only a report that you pass (`symmetries=ns.symmetries(model, example)`). This page is made from the
rules by `python -m normscope._doctor`; a test fails when it is stale.

Models from `transformers` configurations (`tests/certify/test_zoo.py`) are clean but for these findings, each of which is right:
MobileNetV2 and EfficientNet give BN a momentum of 0.997 and 0.99, which in torch is the weight of the *new* batch (NS207), and
EfficientNet draws γ around zero with a deviation of 0.02 when it is made from a configuration (NS201, NS202). With an optimizer
on all parameters, `AdamW` as it comes decays γ and β (NS301). What the doctor and torch-audit find of 44 planted mistakes:
`python -m bench doctor_mistakes`, [benchmarks](benchmarks.md).
"""


def documentation() -> str:
    """The introduction, then one section per rule."""
    parts = [INTRODUCTION.rstrip()]
    for prefix, title in GROUPS.items():
        parts.append(f"## {title} ({prefix}xx)")
        parts += [_section(RULES[rule]) for rule in sorted(RULES) if rule.startswith(prefix)]
    return "\n\n".join(parts) + "\n"


def _section(check: Rule) -> str:
    needs = f" Needs: {', '.join(check.needs)}." if check.needs else ""
    title = f"### {check.id}: {check.title}"
    return f"{title}\n{check.severity.capitalize()}.{needs} {check.why}\n\n*Fix.* {check.fix}\n\n*Reference.* {check.reference}."
