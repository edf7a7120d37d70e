"""Tokenising ahead: MB/s and tokens/s of `unisono data prepare` beside `datasets.map`, on the same documents.

    python -m benchmarks.prepare [--mb 24] [--rounds 3] [--workers 1 2] [--write]

Documents are generated (words of a fixed vocabulary by Zipf's law, lengths lognormal with a median of 330 words) and
written as JSON lines; a byte-level BPE of 8,192 tokens is trained on a part of them. Each contender reads the same
file, tokenises it with the same tokenizer and writes token ids as Arrow to a folder of its own; the tokens are then
compared, so that all have done the same. Rounds are interleaved, every one in fresh processes, and the median of their
seconds counts, the start of the interpreter and its imports left out; processor seconds tell more on a machine that
others use too, and have the imports of worker processes in them. `datasets` gets the library as its docs say:
batched, `num_proc`. A worker of ours tokenises on one core, and so does one of theirs; one worker may use one core.

Needs: pip install datasets
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks import page


def documents(path: Path, megabytes: float) -> None:
    """Made-up text of about this size, as JSON lines."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    odds = 1 / np.arange(1, 27) ** 0.8
    words = ["".join(rng.choice(letters, rng.integers(2, 12), p=odds / odds.sum())) for _ in range(20_000)]
    ranks = 1 / np.arange(1, len(words) + 1)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            count = max(1, int(rng.lognormal(np.log(330), 1.1)))
            text = " ".join(words[i] for i in rng.choice(len(words), count, p=ranks / ranks.sum()))
            written += file.write(json.dumps({"text": text}) + "\n")


def train(path: Path, folder: Path) -> None:
    """A tokenizer on the first documents."""
    from unisono_language.data import tokenizer

    with path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(500), lines, strict=False)]
    engine = tokenizer._train(texts, 8192)
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))


def ours(path: Path, tokenizer: Path, out: Path, workers: int, kind: str) -> float:
    """Seconds of our preparation."""
    import tokenizers  # noqa: F401 - as the peer has it loaded before its time begins

    from unisono.data.prepare.preparation import prepare
    from unisono_language.data.texts import Texts
    from unisono_language.data.tokenizer import load_tokenizer
    from unisono_language.data.tokens import TokenisePreparation
    from unisono_language.settings import CorpusFiles

    began = time.perf_counter()
    preparation = TokenisePreparation(Texts.from_files(CorpusFiles(path=str(path))), load_tokenizer(tokenizer))
    prepare(preparation, out, workers=workers, kind=kind, shard_mb=2)  # type: ignore[arg-type]
    return time.perf_counter() - began


def theirs(path: Path, tokenizer: Path, out: Path, workers: int) -> float:
    """Seconds of `datasets`: read, map, save."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    began = time.perf_counter()
    engine = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = engine.token_to_id("<|endoftext|>")

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = engine.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"tokens": [[end, *encoding.ids, end] for encoding in encodings]}

    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(out / "cache"))
    tokenised = rows.map(
        tokenise, batched=True, batch_size=256, num_proc=workers if workers > 1 else None,
        remove_columns=rows.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))}),
    )  # fmt: skip
    tokenised.save_to_disk(str(out / "saved"), num_proc=workers if workers > 1 else None)
    return time.perf_counter() - began


def contend(name: str, path: Path, tokenizer: Path, out: Path, workers: int) -> None:
    """One round of one contender, in this process; prints its seconds, and those of its processors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else one worker would use all cores
    started = spent()
    seconds = theirs(path, tokenizer, out, workers) if name == "datasets" else ours(path, tokenizer, out, workers, name)
    print(json.dumps([seconds, spent() - started]))


def spent() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def tokens_of(name: str, out: Path) -> np.ndarray:
    """All token ids that a contender has written, in order."""
    if name != "datasets":
        from unisono.data.prepare.shards import Shards

        return np.concatenate([values for values, _ in Shards(out).batches()])
    import datasets

    table = datasets.load_from_disk(str(out / "saved")).data
    return np.concatenate([chunk.flatten().to_numpy() for chunk in table.column("tokens").chunks])


def measure(megabytes: float, rounds: int, counts: list[int]) -> tuple[list[list[str]], str]:
    """The rows of the table, and what was measured on."""
    contenders = [(name, count) for count in counts for name in ("threads", "processes", "datasets")]
    if find_spec("datasets") is None:
        print("datasets is not there (pip install datasets); left out", file=sys.stderr)
        contenders = [one for one in contenders if one[0] != "datasets"]
    seconds: dict[tuple[str, int], list[list[float]]] = {one: [] for one in contenders}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path, tokenizer = folder / "documents.jsonl", folder / "tokenizer"
        documents(path, megabytes)
        train(path, tokenizer)
        size = path.stat().st_size / 1e6
        wanted: np.ndarray | None = None
        for number in range(rounds):
            for name, count in contenders:
                out = folder / f"{name}-{count}-{number}"
                words = [name, str(path), str(tokenizer), str(out), str(count)]
                command = [sys.executable, "-m", "benchmarks.prepare", "--contend", *words]
                environment = {**os.environ, "UNISONO_CACHE": str(folder / f"cache-{name}-{count}-{number}")}
                done = subprocess.run(
                    command, cwd=page.ROOT, capture_output=True, text=True, check=True, env=environment
                )
                seconds[name, count].append(json.loads(done.stdout.splitlines()[-1]))
                token_count = tokens_of(name, out)
                wanted = token_count if wanted is None else wanted
                assert np.array_equal(token_count, wanted), f"{name} has made other tokens"
                print(f"round {number}: {name} × {count}: {seconds[name, count][-1]} s", file=sys.stderr)
        assert wanted is not None
        tokens = len(wanted)
    names = {"threads": "unisono, threads", "processes": "unisono, processes", "datasets": "datasets.map"}
    rows = []
    for name, count in contenders:
        middle, processor = (statistics.median(column) for column in zip(*seconds[name, count], strict=True))
        rates = [f"{size / middle:.2f}", f"{tokens / middle:,.0f}", f"{tokens / processor:,.0f}"]
        rows.append([names[name], str(count), f"{middle:.2f}", f"{processor:.2f}", *rates])
    about = (
        f"{size:.1f} MB of JSON lines, {tokens:,} tokens; {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}; medians of {rounds} interleaved rounds"
    )
    return rows, about


def table(rows: list[list[str]], about: str) -> str:
    head = ["", "workers", "seconds", "of processors", "MB/s", "tokens/s", "tokens per processor second"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        [*("| " + " | ".join(line) + " |" for line in lines), "", f"`python -m benchmarks.prepare`: {about}"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--contend", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        name, path, tokenizer, out, workers = arguments.contend
        return contend(name, Path(path), Path(tokenizer), Path(out), int(workers))
    text = table(*measure(arguments.mb, arguments.rounds, arguments.workers))
    print(text)
    if arguments.write:
        page.put("prepare", text)
    return None


if __name__ == "__main__":
    main()
