"""How much the language recipe learns in half an hour, beside methods that nobody doubts: the figures of its README.

    python -m recipes.language.benchmarks.learning train FOLDER RUNS [--steps 800]
    python -m recipes.language.benchmarks.learning compare RUNS/learning [--curve FILE.svg]

FOLDER has a folder of documents for each source (Parquet with a column `text`; of a text file, documents end at blank
lines). `train` runs the recipe's smallest Llama on two processes; the number of steps decides how long. `compare`
evaluates it on all documents that were held out, and predicts the same tokens of the same documents by an interpolated
Kneser-Ney model of five tokens (Kneser & Ney, 1995; Chen & Goodman, 1999), counted on the same training documents; and
it compresses them by xz, which has read the training documents before. Everything is given in bits per byte of text.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono

Tokens = NDArray[np.int64]
ORDER, ALL = 5, "all"
_DICTIONARY = 1 << 26  # bytes that xz looks back, more than all training documents have


def train(folder: Path, runs: Path, steps: int) -> None:
    """Train on all sources of a folder."""
    sources = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        separator = ', separator: "\n\n"' if any(place.glob("*.txt")) else ""
        sources.append(f"{place.name}: {{path: {place}{separator}}}")
    command = [
        sys.executable, "-m", "unisono", "train", "language", "data=corpus", f"data.sources={{{', '.join(sources)}}}",
        "data.packing={}", "task.sequence=512", "train.global_batch=16", "layout.micro_batch=8", "layout.world_size=2",
        "layout.threads=1", "train.precision=bf16", "optim=muon", "optim.lr=1e-2", "optim.weight_decay=0.1",
        f"train.steps={steps}", "schedules.lr.decay=0.25", "eval.every=100", "eval.rows=128", "checkpoint.every=50",
        f"run.dir={runs}", "run.name=learning",
    ]  # fmt: skip
    subprocess.run(command, check=True)


class KneserNey:
    """An interpolated Kneser-Ney model; n-grams are numbers whose digits are tokens.

    Args:
        documents: tokens of each, the first of which is only context.
        size: of the vocabulary.
    """

    def __init__(self, documents: Iterator[Tokens], size: int) -> None:
        self._base = size
        if ORDER * math.log2(size) >= 63:
            sys.exit(f"{size} tokens are too many for n-grams of {ORDER} in 64 bits")
        keys, counts = np.unique(self._grams(documents), return_counts=True)
        self._orders: list[tuple[Tokens, Any, Tokens, Any, Any, float]] = []
        for order in range(ORDER, 0, -1):
            ones, twos = ((counts == n).sum() for n in (1, 2))
            discount = float(ones / (ones + 2 * twos))
            contexts, starts = np.unique(keys // size, return_index=True)
            totals, kinds = np.add.reduceat(counts, starts), np.diff([*starts, len(keys)])
            self._orders.append((keys, counts, contexts, totals, kinds, discount))
            keys, counts = np.unique(keys % size ** (order - 1), return_counts=True)  # how many tokens come before

    def nats(self, documents: Iterator[Tokens]) -> float:
        """The negative log-likelihood of all tokens but the first of each document."""
        grams = self._grams(documents)
        probability = np.full(len(grams), 1 / self._base)
        for order, (keys, counts, contexts, totals, kinds, discount) in enumerate(reversed(self._orders), 1):
            own = grams % self._base**order
            count = _look_up(keys, counts, own)
            total, kind = (_look_up(contexts, values, own // self._base) for values in (totals, kinds))
            known = total > 0
            mixed = (np.maximum(count - discount, 0) + discount * kind * probability) / np.maximum(total, 1)
            probability = np.where(known, mixed, probability)
        return float(-np.log(probability).sum())

    def _grams(self, documents: Iterator[Tokens]) -> Tokens:
        """The n-gram that ends at each token but the first, (tokens,); the first stands before itself, too."""
        found = []
        for tokens in documents:
            padded = np.concatenate([np.full(ORDER - 2, tokens[0]), tokens])
            windows = np.lib.stride_tricks.sliding_window_view(padded, ORDER)
            found.append(windows @ (self._base ** np.arange(ORDER - 1, -1, -1, dtype=np.int64)))
        return np.concatenate(found)


def _look_up(keys: Tokens, values: Any, wanted: Tokens) -> NDArray[np.float64]:
    """The value of each key, 0 for one that is not there."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0).astype(np.float64)


def xz_bits(training: bytes, held_out: bytes) -> tuple[float, float]:
    """Bits per byte of the held-out documents: compressed alone, and after the training documents."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": _DICTIONARY}]
    alone, before, both = (
        len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters))
        for text in (held_out, training, training + held_out)
    )
    return 8 * alone / len(held_out), 8 * (both - before) / len(held_out)


def measure_baselines(run: Path) -> tuple[dict[str, float], float, float]:
    """Bits per byte of the n-gram model by source, and of xz alone and after the training documents."""
    task: Any = unisono.open_run(run).task
    stores, split, size = task.library.corpora, task.library.split, task.tokenizer.token_bytes

    def documents(part: int, only: str | None = None) -> Iterator[Tokens]:
        for name, store in stores.items():
            for row in split[name][part] if only in (None, name) else ():
                yield store.slice(int(row), 0, int(store.lengths[row]))

    def text(part: int) -> bytes:
        decoded: str = "".join(task.tokenizer.decode(tokens.tolist()) for tokens in documents(part))
        return decoded.encode()

    model, found = KneserNey(documents(0), task.tokenizer.size), {}
    for name in [*stores, None]:
        sizes = sum(float(size[tokens[1:]].sum()) for tokens in documents(1, name))
        found[name or ALL] = model.nats(documents(1, name)) / math.log(2) / sizes
    del model
    return found, *xz_bits(text(0), text(1))


def compare(run: Path, curve: Path | None) -> None:
    """Print the table, and draw the curve of the evaluations."""
    grams, alone, after = measure_baselines(run)
    command = [sys.executable, "-m", "unisono", "evaluate", str(run), "eval.rows=null"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    own = dict(line.split(": ") for line in said.splitlines() if ": " in line)
    print("| held-out documents | the model | 5-gram Kneser-Ney | xz after the training documents | xz alone |")
    print("|---|---|---|---|---|")
    for name, bits in grams.items():
        model = float(own["bits_per_byte" if name == ALL else f"{name}/bits_per_byte"])
        print(f"| {name} | {model:.3f} | {bits:.3f} | " + (f"{after:.3f} | {alone:.3f} |" if name == ALL else "| |"))
    if curve is not None:
        _draw(run, curve, grams[ALL], after)


def _draw(run: Path, file: Path, grams: float, compressed: float) -> None:
    from matplotlib import pyplot

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evaluated = [event for event in events if event.get("eval")]
    last = evaluated[-1]  # every evaluation reads the same rows, so that bits and nats have one ratio
    values = [event["loss"] * last["bits_per_byte"] / last["loss"] for event in evaluated]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([event["step"] for event in evaluated], values, marker=".", label="the model")
    axes.axhline(grams, color="tab:orange", linestyle="--", label="5-gram Kneser-Ney")
    axes.axhline(compressed, color="tab:gray", linestyle=":", label="xz after the training documents")
    axes.set(xlabel="step", ylabel="held-out bits per byte")
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("train")
    verb.add_argument("folder", type=Path)
    verb.add_argument("runs", type=Path)
    verb.add_argument("--steps", type=int, default=800)
    verb.set_defaults(do=train)
    verb = verbs.add_parser("compare")
    verb.add_argument("run", type=Path)
    verb.add_argument("--curve", type=Path)
    verb.set_defaults(do=compare)
    words = vars(parser.parse_args())
    words.pop("do")(**words)


if __name__ == "__main__":
    main()
