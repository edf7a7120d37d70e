"""A scaling study of the language recipe: five widths of a small Llama, three seeds each, and the law through them.

    python -m benchmarks.scaling [--out DIR] [--jobs 2]

Types the commands of recipes/language/README.md: the sweep, two comparisons with a power-law fit each, and the report.
The documents are those of Python's standard library, so nothing is downloaded. The same command continues a study that
was interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

RATES = {12: 6e-3, 24: 4.2e-3, 48: 3e-3, 96: 2.1e-3, 192: 1.5e-3}  # by width, and falling with its square root
NAME = "widths"
HIDDEN, INNER = "model.settings.hidden_size", "model.settings.intermediate_size"
WORDS = (
    f"{HIDDEN}={','.join(map(str, RATES))}", f"{INNER}={','.join(str(3 * width) for width in RATES)}",
    f"optim.lr={','.join(map(str, RATES.values()))}", f"zip=[{HIDDEN},{INNER},optim.lr]", "seeds=3",
    "model.settings.num_hidden_layers=2", "model.settings.num_attention_heads=3",
    "model.settings.num_key_value_heads=3", "data.vocab_size=1024", "task.sequence=64", "train.steps=400",
    "eval.every=100", "eval.rows=512", f"name={NAME}",
)  # fmt: skip


def run(*words: str) -> None:
    """Type a command of `unisono`."""
    print(f"$ unisono {shlex.join(words)}", flush=True)
    if code := subprocess.run([sys.executable, "-m", "unisono", *words]).returncode:
        sys.exit(code)


def main() -> None:
    """Run the study, or what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the sweep")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parsed = parser.parse_args()
    sweep = parsed.out / NAME
    run("sweep", "language", *WORDS, f"run.dir={parsed.out}", f"jobs={parsed.jobs}")
    for column in ("parameters", "flops"):
        run("compare", str(sweep), f"fit={column}", f"out={sweep / f'by_{column}'}")
    run("report", str(sweep))


if __name__ == "__main__":
    main()
