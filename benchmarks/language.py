"""What the language recipe learns: the table of its README.

    python -m benchmarks.language [--corpus DIR] [--pretrained DIR --stories FILE]

The embedded example as it comes; a corpus of one's own for 300 steps; a pretrained model trained on for 20. Each is
trained on two processes and evaluated on all its held-out documents. The unigram entropy is the loss on them of a model
that knows only how frequent tokens are in the training documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def train(name: str, *overrides: str) -> None:
    """Train by the command line and print a row of the table."""
    command = [sys.executable, "-m", "unisono", "train", "language", "eval.rows=null", "eval.every=null"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, f"run.dir={folder}", "run.name=run", *overrides], capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = (Path(folder) / "run" / "events.jsonl").read_text().splitlines()
        facts = json.loads((Path(folder) / "run" / "fingerprint.json").read_text())["data"]
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if "eval" not in event]
    last = events[-1]
    print(
        f"| {name} | {facts['documents']} documents, {facts['tokens']:,} tokens | {len(steps)} | "
        f"{steps[0]['loss']:.3f} | {last['loss']:.3f} ({last['rows']} rows) | {facts['unigram_entropy']:.3f} | "
        f"{100 * last['accuracy']:.1f} % |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="directory of documents in any format that the recipe reads")
    parser.add_argument("--pretrained", type=Path, help="directory of a small pretrained model")
    parser.add_argument("--stories", type=Path, help="file of documents for it, separated by <|endoftext|>")
    arguments = parser.parse_args()
    print("| run | data | steps | first loss | held-out loss | unigram entropy | accuracy |")
    print("|---|---|---|---|---|---|---|")
    train("the embedded example")
    if arguments.corpus:
        train("a corpus", "data=corpus", f"data.path={arguments.corpus}", "train.steps=300")
    if arguments.pretrained and arguments.stories:
        train(
            "a pretrained model", "model=pretrained", f"model.path={arguments.pretrained}", "data=corpus",
            f"data.path={arguments.stories}", "data.separator='<|endoftext|>'", "data.held_out=0.4", "train.steps=20",
            "train.global_batch=4", "optim.lr=1e-4",
        )  # fmt: skip


if __name__ == "__main__":
    main()
