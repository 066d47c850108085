"""Networks that nobody here wrote: every architecture of `transformers` and a table of `diffusers`, audited and checked.

    python -m bench wild [--package transformers|diffusers] [--part i/n] [--only NAME,…] [--results DIR] [--page docs/wild.md]

Results are kept, one file per model, in `--results`; the page is about all that are there, and keeps what it says of every other
model.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = ("transformers", "diffusers")


def main() -> None:
    from bench.wild.table import page, summary
    from bench.wild.trial import GIBIBYTES, SECONDS, trial

    parser = argparse.ArgumentParser(prog="python -m bench wild")
    parser.add_argument("--package", choices=PACKAGES, default="transformers")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model, from the i-th")
    parser.add_argument("--only", default="", help="names of models, with commas between them")
    parser.add_argument("--results", type=Path, default=Path("build/wild"))
    parser.add_argument("--page", type=Path, help="where to write the table, for example docs/wild.md")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--gibibytes", type=int, default=GIBIBYTES)
    parser.add_argument("--table", action="store_true", help="run nothing: only tell what the results say")
    given = parser.parse_args(sys.argv[sys.argv.index("wild") + 1 :] if "wild" in sys.argv else [])
    part, parts = map(int, given.part.split("/"))
    folder = given.results / given.package
    folder.mkdir(parents=True, exist_ok=True)
    if not given.table:
        models = import_module(f"bench.wild.{given.package}_models")
        _quiet(given.package)
        for name in given.only.split(",") if given.only else models.names()[part - 1 :: parts]:
            record = trial(name, models.build, given.seconds, given.gibibytes)
            (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            said = "; ".join([record.get("why", record.get("upper", "")), *(f"WRONG {text}" for text in record.get("wrong", ()))])
            print(f"{name:32} {record['outcome']:22} {record.get('seconds', '')!s:6} {said[:400]}", flush=True)
    results: dict[str, list[dict[str, Any]]] = {
        package: [json.loads(path.read_text()) for path in sorted((given.results / package).glob("*.json"))] for package in PACKAGES
    }
    print("\n".join(summary(results[given.package])))
    if given.page:
        listed = {package: len(import_module(f"bench.wild.{package}_models").names()) for package in PACKAGES}
        before = given.page.read_text() if given.page.exists() else ""
        given.page.write_text(page(results, listed, before))


def _quiet(package: str) -> None:
    """Import once what every model's process needs, without its warnings."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    if package == "transformers":
        from transformers import BertConfig, BertModel, ViTConfig, ViTModel  # noqa: F401
        from transformers.models.auto.modeling_auto import MODEL_MAPPING  # noqa: F401

        BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8))
    else:
        try:
            import_module("diffusers")
        except ImportError as error:
            sys.exit(f"{error}: pip install --no-deps diffusers (it is no dependency of the project)")
    import torch

    torch.set_num_threads(1)
