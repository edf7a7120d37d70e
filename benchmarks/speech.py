"""A trainer of Higgs Audio written by hand beside the recipe: step time, reads, all-reduces, memory, padding.

    python -m benchmarks.speech ../shared/data/speech_digits [--rounds 3] [--steps 8] [--micro-batch 2] [--accumulate 8]

Two processes train LoRA adapters on the same small Higgs Audio, codec and recordings. `benchmarks/contenders/
speech_before.py` is the reconstruction, in two variants: with the forward pass round DDP, as the original had it, so
that nothing is reduced and its figure is that of a wrong program; and with DDP, as its authors thought it did. Every
contender runs in turn in each round, the reduced variant twice, which is the A/A control. Ratios are those of a round.
Casts to bf16 are left out on both sides, since the CPU has no use for them. The last update of each run is profiled to
count all-reduces, and is not timed. Reads are those of one process, by its samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import unisono_speech as recipe
from unisono.observe import events
from unisono_speech.settings import Folder, KMeans, SpeechConfig
from unisono_speech.task import Speech

CONTENDERS = Path(__file__).parent / "contenders"
WARM_UP = 2  # updates that are not timed
CODEC = {"rate": 8000, "mels": 32, "codes": 64}
NAMES = ("reduced", "reduced again", "bypassed", "recipe", "recipe, grouped by length")


def model_settings() -> dict[str, Any]:
    """The recipe's small model."""
    path = Path(recipe.__file__).parent / "config" / "model" / "tiny.yaml"
    settings: dict[str, Any] = yaml.safe_load(path.read_text())["settings"]
    return settings


def before(folder: Path, arguments: argparse.Namespace, variant: str) -> list[dict[str, Any]]:
    """What each process of the reconstruction has counted."""
    request = {
        "model": model_settings(),
        "data": {"path": str(arguments.data.resolve()), "codec": {"kind": "kmeans", **CODEC}},
        "variant": variant, "micro_batch": arguments.micro_batch, "accumulate": arguments.accumulate,
        "steps": arguments.steps, "out": str(folder),
    }  # fmt: skip
    (folder / "asked.json").write_text(json.dumps(request))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _run([*words, str(CONTENDERS / "speech_before.py"), str(folder / "asked.json")])
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def ours(folder: Path, arguments: argparse.Namespace, *more: str) -> list[dict[str, Any]]:
    """What each process of the recipe has counted."""
    batch = 2 * arguments.micro_batch * arguments.accumulate
    words = [
        "-m", "unisono", "train", "speech", "data=folder", f"data.path={arguments.data.resolve()}", "adapter=higgs",
        *(f"data.codec.{name}={value}" for name, value in CODEC.items()), "optim.lr=2e-4", "layout.world_size=2",
        "layout.strategy=ddp", "layout.device=cpu", "layout.threads=1", f"layout.micro_batch={arguments.micro_batch}",
        f"train.global_batch={batch}", f"train.steps={arguments.steps + 1}", "eval.every=null", "eval.at_end=false",
        "checkpoint.every=null", "checkpoint.at_end=false", "observe.trackers=[]", f"run.dir={folder}", "run.name=r",
        f"callbacks=[{CONTENDERS / 'speech_counters.py'}:Count]", *more,
    ]  # fmt: skip
    _run(words)
    reports = [json.loads((folder / "r" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    times = [step["seconds"] for step in events.step_events(events.read_events(folder / "r" / "events.jsonl"))]
    samples = batch // 2 * (arguments.steps + 1)
    return [{**one, "times": times[: arguments.steps], "samples": samples} for one in reports]


def padding(arguments: argparse.Namespace, size: int | None) -> float:
    """Places of padding for each real one over twenty global batches, by the lengths of rows as they are trained."""
    from unisono import SampleContext, generator
    from unisono.data.order.order import Order
    from unisono.data.order.plan import LengthGroups, StreamPlan

    task = Speech(
        SpeechConfig(), model=recipe_model(), data=Folder(kind="folder", path=arguments.data, codec=KMeans(**CODEC))
    )
    source, batch = task.data(), 2 * arguments.micro_batch * arguments.accumulate
    groups = None if size is None else LengthGroups(source.lengths, size)
    plan = StreamPlan.create(Order(len(source), 0), batch, 20, None, groups)
    padded = real = 0
    for step in range(20):
        indices = plan.samples(step, range(batch))
        lengths = np.array(
            [
                len(task.sample(source[row], SampleContext(generator("padding", row, epoch), training=True)).ids)
                for row, epoch in zip(indices.rows.tolist(), indices.epochs.tolist(), strict=True)
            ]
        )
        padded += int((lengths.reshape(-1, arguments.micro_batch).max(1) * arguments.micro_batch).sum())
        real += int(lengths.sum())
    return padded / real - 1


def recipe_model() -> Any:
    """The small model as a setting of the task."""
    from unisono_speech.settings import FromConfig

    return FromConfig(kind="config", settings=model_settings())


def _run(words: list[str]) -> None:
    path = os.pathsep.join([str(CONTENDERS), os.environ.get("PYTHONPATH", "")])
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], env={**os.environ, **more}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nended with exit status {done.returncode}:\n{done.stdout}\n{done.stderr}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    for name, default in (("rounds", 3), ("steps", 8), ("micro-batch", 2), ("accumulate", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in NAMES}
    for number in range(arguments.rounds):
        for name in NAMES[number % len(NAMES) :] + NAMES[: number % len(NAMES)]:
            with tempfile.TemporaryDirectory() as folder:
                if name.startswith("recipe"):
                    more = [f"data.group_by_length={arguments.micro_batch}"] if "grouped" in name else []
                    results = ours(Path(folder), arguments, *more)
                else:
                    results = before(Path(folder), arguments, name.partition(" ")[0])
            runs[name].append(results)
            step = statistics.median(results[0]["times"][WARM_UP:])
            print(f"  round {number + 1}, {name}: {step:.2f} s an update", flush=True)

    seconds = {
        name: [statistics.median(one[0]["times"][WARM_UP:]) for one in results] for name, results in runs.items()
    }
    print("| | seconds an update ÷ reduced | reads a sample | all-reduces of gradients | of MB | others | peak, MB |")
    print("|---|---|---|---|---|---|---|")
    for name, results in runs.items():
        ratios = [mine / base for mine, base in zip(seconds[name], seconds["reduced"], strict=True)]
        first = results[0][0]
        memory = statistics.median(max(rank["memory"] for rank in one) for one in results)
        shown = f"1 ({statistics.median(seconds[name]):.2f} s)" if name == "reduced" else _spread(ratios)
        reads = statistics.median(one[0]["reads"] / one[0]["samples"] for one in results)
        print(
            f"| {name} | {shown} | {reads:.2f} | {first['gradient_reductions']} | {4e-6 * first['numbers']:.1f} | "
            f"{first['other_reductions']} | {memory:.0f} |"
        )
    for size in (None, arguments.micro_batch):
        share = 100 * padding(arguments, size)
        print(f"padding with data.group_by_length={size or 'null'}: {share:.1f} % of the real places")


if __name__ == "__main__":
    main()
