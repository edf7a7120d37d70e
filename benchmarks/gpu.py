"""What Unisono does on a GPU, beside bare loops in the same run: one command, at most six minutes, one table.

    python -m benchmarks.gpu --out gpu.json                    # on a host with a GPU, from a checkout
    python -m benchmarks.gpu --out gpu.json --device cpu --tiny    # runs all of its code; the figures mean nothing

Needs what `make test-gpu` needs. Each row is measured in a process of its own, so one that fails says so in its row and
ends no other; one whose time is over is killed with all that it has started. The file is written after every row. Rows
of one group are to be compared with each other alone. What no time is left for says so as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import bare_loops, checkout

TOTAL = 345.0  # seconds of all rows, which leaves some for the start
AGAIN = "again, with its cache"
# Every compiler's cache is empty when a first step is measured as cold, whatever else ran on this host.
CACHES = ("UNISONO_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
LEAST = 60.0  # seconds that any row may take; a CPU may take as long as it needs for all, and more for one
LEAST_ON_CPU = 300.0
# Group, what is measured, the seconds that it should take on one GPU, and how.
Row = tuple[str, str, float, Callable[[], dict[str, Any]]]
VOCABULARY = 4096  # of the recipe's own documents, so that the bare loop has the same products
# 692 M parameters, which a card of 80 GB trains in fp32 master weights with room for activations.
LARGE = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {**LARGE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip


class Sizes:
    """What is trained: as large as a GPU needs to be busy, or tiny."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.sequence, self.batch = (64, 2) if tiny else (2048, 8)
        self.steps = 8 if tiny else 16
        # Of recipes whose own models are small.
        self.as_typed = [f"train.steps={self.steps}", *(["train.global_batch=2"] if tiny else [])]
        self.llama = SMALL if tiny else LARGE
        self.rows, self.side, self.cycles = (8, 4, (1, 1)) if tiny else (768, 9, (3, 6))

    @property
    def language(self) -> list[str]:
        """Settings of the language recipe."""
        settings = ", ".join(f"{name}: {str(value).lower()}" for name, value in self.llama.items())
        return [
            f"model.settings={{{settings}}}", f"task.sequence={self.sequence}", f"train.global_batch={self.batch}",
            "data.packing={method: concatenate}", "train.precision=bf16", f"train.steps={self.steps}",
        ]  # fmt: skip

    @property
    def puzzles(self) -> list[str]:
        """Settings of the puzzles recipe: TRM-MLP as published, or tiny."""
        clues = {4: "[6,8]", 9: "[30,34]"}[self.side]
        return [
            "model=tiny" if self.tiny else "model=trm_mlp", f"model.h_cycles={self.cycles[0]}",
            f"model.l_cycles={self.cycles[1]}", f"data.side={self.side}", f"data.clues={clues}",
            f"data.puzzles={2 * self.rows}", "data.held_out=8", f"train.global_batch={self.rows}",
            "train.precision=bf16", f"train.steps={self.steps}", "optim.lr=1e-4",
        ]  # fmt: skip


def measured_rows(device: str, sizes: Sizes) -> Iterator[Row]:
    """What is measured, the most wanted first."""

    def train(recipe: str, words: list[str], *more: str) -> Callable[[], dict[str, Any]]:
        return lambda: trained(recipe, device, [*words, *more])

    def bare_language(compile: bool) -> dict[str, Any]:
        shape = sizes.batch, sizes.sequence
        return bare_loops.language(device, sizes.llama, VOCABULARY, shape, sizes.steps, compile)

    loss = "language, bf16"
    yield loss, "a bare loop, blocks compiled", 25, lambda: bare_language(compile=True)
    yield loss, "unisono, compiled", 35, train("language", sizes.language, "layout.compile=true")
    yield loss, "unisono, eager", 22, train("language", sizes.language)
    yield loss, "a bare loop, eager", 16, lambda: bare_language(compile=False)
    step = f"puzzles, {sizes.rows} rows of {sizes.side}×{sizes.side}, bf16"
    yield step, "unisono, torch compiled", 35, train("puzzles", sizes.puzzles, "layout.compile=true")
    yield step, "unisono, JAX", 30, train("puzzles", sizes.puzzles, "layout.engine=jax")
    yield step, f"unisono, JAX {AGAIN}", 14, train("puzzles", sizes.puzzles, "layout.engine=jax")
    yield step, "the published loop, eager", 14, lambda: published_puzzles(device, sizes)
    yield "birdsong, JAX, as typed", "unisono", 25, train("birdsong", sizes.as_typed)
    yield "birdsong, JAX, as typed", f"unisono {AGAIN}", 14, train("birdsong", sizes.as_typed)
    yield "birdsong, JAX, as typed", "a bare loop", 20, lambda: bare_loops.birdsong(sizes.as_typed, sizes.steps)
    yield "speech, as typed", "unisono", 14, train("speech", sizes.as_typed)
    yield "speech, as typed", "a bare loop", 10, lambda: bare_loops.speech(device, sizes.as_typed, sizes.steps)
    yield step, f"unisono, torch compiled {AGAIN}", 15, train("puzzles", sizes.puzzles, "layout.compile=true")
    yield "experts of one layer, bf16", "grouped, transformers' loop", 12, lambda: experts_passes(device, sizes)
    yield "samples of puzzles", "all at once, one by one", 7, lambda: samples(sizes)
    yield step, "unisono, torch eager", 14, train("puzzles", sizes.puzzles)
    # Last: it finds a size of its own, and compiles nothing.
    auto = ["task.sequence=64"] if sizes.tiny else [
        word for word in sizes.language if not word.startswith(("train.global_batch", "train.steps"))
    ]  # fmt: skip
    auto += ["train.global_batch=64", "train.steps=3", "layout.micro_batch=auto"]
    yield "layout.micro_batch=auto", "unisono", 23, train("language", auto)


# how ------------------------------------------------------------------------------------------------------------------


def trained(recipe: str, device: str, words: list[str]) -> dict[str, Any]:
    """A run of the command: its median step, MFU and wait for data, and when its first step was done."""
    with tempfile.TemporaryDirectory() as folder:
        own = [
            "layout.world_size=1", f"layout.device={device}", "eval.every=null", "checkpoint.every=null",
            "checkpoint.at_end=false", "observe.progress=false", "observe.trackers=[]", f"run.dir={folder}",
            "run.name=run",
        ]  # fmt: skip
        if "layout.engine=jax" in words or recipe == "birdsong":
            own[1] = "layout.device=auto"
        elif device == "cpu":
            own.append("layout.threads=1")
        events = Path(folder) / "run" / "events.jsonl"
        command = [sys.executable, "-m", "unisono", "train", recipe, *own, *words]
        began, first = time.monotonic(), None
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                if first is None and events.is_file() and '"loss"' in events.read_text("utf-8"):
                    first = time.monotonic() - began
                time.sleep(0.05)
            output.seek(0)
            if process.returncode:
                raise RuntimeError(output.read().strip().splitlines()[-1])
        steps = [json.loads(line) for line in events.read_text("utf-8").splitlines()]
    steps = [step for step in steps if "loss" in step and not step.get("eval")]
    late = steps[min(bare_loops.WARM, len(steps) - 2) :]
    found = {"ms a step": 1e3 * statistics.median(step["seconds"] for step in late)}
    found["first step after, s"] = first
    found["data wait"] = statistics.mean(step["data_wait"] for step in late)
    if "mfu" in late[-1]:
        found["mfu"] = statistics.median(step["mfu"] for step in late)
    if "memory_gb" in late[-1]:
        found["peak, GB"] = max(step["memory_gb"] for step in steps)
    return found


def published_puzzles(device: str, sizes: Sizes) -> dict[str, Any]:
    """The loop as it was published, with the model of `sizes`."""
    model = {"mixer": "mlp", "positions": "none", "h_cycles": sizes.cycles[0], "l_cycles": sizes.cycles[1]}
    if sizes.tiny:
        model |= {"width": 64, "heads": 4, "prefix": 4, "embedding": 64, "inner_multiple": 32}
    return bare_loops.puzzles(device, sizes.side, sizes.rows, model, sizes.steps)


def samples(sizes: Sizes) -> dict[str, Any]:
    """A micro-batch of puzzles in one thread, the fastest of ten."""
    import numpy as np

    from benchmarks import puzzles
    from unisono.data.loading.batch_builder import BatchBuilder
    from unisono.data.loading.micro_batch import Request
    from unisono.data.order.plan import SampleIndices

    task = puzzles.task_of("torch", sizes.side, sizes.rows, {})
    rows = np.arange(sizes.rows)
    request, found = Request(0, range(sizes.rows), SampleIndices(rows, rows, np.zeros_like(rows))), {}
    for name, together in (("all at once", True), ("one by one", False)):
        builder, times = BatchBuilder(task, task.data(), 0, "train", contents=True, together=together), []
        for _ in range(10):
            began = time.perf_counter()
            builder.make(request)
            times.append(time.perf_counter() - began)
        found[f"ms, {name}"] = 1e3 * min(times)
    return found


def experts_passes(device: str, sizes: Sizes) -> dict[str, Any]:
    """A layer of the size of OLMoE's, forward and backward; the fastest of ten."""
    import torch

    from benchmarks import experts
    from unisono_language.experts import register_grouped

    register_grouped()
    size, found = experts.SIZES[0 if sizes.tiny else 1], {}
    module = experts.layer(size, torch.bfloat16, device)
    given = experts.inputs(size, torch.bfloat16, device)
    for name, how in (("grouped", "grouped"), ("transformers' loop", "loop")):
        times = [experts.once(module, how, given, device) for _ in range(3 if sizes.tiny else 10)]
        found[f"ms a pass, {name}"] = min(times[1:])
    return found


# all of it ------------------------------------------------------------------------------------------------------------


def describe_host() -> dict[str, Any]:
    """Card and versions."""
    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d")}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for name in ("jax", "transformers"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "none"
    return found


def measure(number: int, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--row", str(number), "--device", arguments.device]
    command += ["--tiny"] if arguments.tiny else []
    return run_row(command, seconds)


def run_row(command: list[str], seconds: float) -> dict[str, Any]:
    """The last line that a command prints, as JSON; what runs after so many seconds is killed, its children too."""
    # A session of its own: a run that it has started would keep the GPU busy for the rows after it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=checkout.ROOT, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"not measured": f"its time was over after {seconds:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return {"not measured": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:200]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def format_value(name: str, value: Any) -> str:
    """A figure with its unit."""
    if value is None or isinstance(value, str):
        return f"{name}: {value or 'unknown'}"
    return f"{name} {100 * value:.1f} %" if name in ("mfu", "data wait") else f"{name} {value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run all of the code on the smallest sizes")
    parser.add_argument("--seconds", type=float, help="of all rows, on a GPU 345; what has no time is named")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = list(measured_rows(arguments.device, Sizes(arguments.tiny)))
    on_cpu = arguments.device == "cpu"
    total = arguments.seconds or (math.inf if on_cpu else TOTAL)
    least = LEAST_ON_CPU if on_cpu else LEAST
    if arguments.row is not None:
        print(json.dumps(rows[arguments.row][-1]()))
        return
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as folder:
        if missing := checkout.prepare(Path(folder)):
            sys.exit(f"{', '.join(missing)} cannot be imported here: see `make gpu-wheels`")
        os.environ.update({name: f"{folder}/{name}" for name in CACHES})
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # else it would be used instead of ours
        host, began, found = describe_host(), time.monotonic(), []
        print(f"{host}\n\n| group | what | figures |\n|---|---|---|", flush=True)
        for number, (group, what, expected, _) in enumerate(rows):
            left = total - (time.monotonic() - began)
            seconds = min(left, max(least, 2 * expected))  # one that hangs leaves time for others
            figures = measure(number, arguments, seconds) if left > 5 else {"not measured": "no time was left"}
            found.append({"group": group, "what": what, **figures})
            shown = ", ".join(format_value(name, value) for name, value in figures.items())
            print(f"| {group} | {what} | {shown} |", flush=True)
            if arguments.out:
                text = json.dumps({"host": host, "seconds": time.monotonic() - began, "rows": found}, indent=1)
                arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
