"""What Unisono does on a GPU, beside bare loops in the same run: one command, at most six minutes, one table.

    python -m benchmarks.gpu --out gpu.json                    # on a host with a GPU, from a checkout
    python -m benchmarks.gpu --out gpu.json --device cpu --tiny    # runs all of its code; the figures mean nothing

Needs what `make test-gpu` needs. A row that fails says so and ends no other. Rows that need the same share a process:
one whose time is over is killed with its process and all that this has started, and those after it say so. The file is
written after every row. Rows of one group are to be compared with each other alone. What no time is left for says so as
well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import IO, Any

from benchmarks import bare_loops, checkout

TOTAL = 345.0  # seconds of all rows, which leaves some for the start
AGAIN = "again, with its cache"
ROW = "row: "  # begins a line of a process, and JSON follows
# Every compiler's cache is empty when a first step is measured as cold, whatever else ran on this host.
CACHES = ("UNISONO_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
LEAST = 60.0  # seconds that any row may take; a CPU may take as long as it needs for all, and more for one
LEAST_ON_CPU = 300.0
Figures = dict[str, Any]
# Group, what is measured, the seconds that it should take on one GPU (the first of a process: with its start), and how.
Row = tuple[str, str, float, Callable[[], Figures]]
SHARES = ("mfu", "data wait", "idle", "of a DCP save")
LONG, SHORT = "long.jsonl", "short.jsonl"  # files of documents
CHARACTERS = 3  # of a token of documents, about
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
        self.steps = 8 if tiny else 12
        # Of recipes whose own models are small.
        self.as_typed = ["train.global_batch=2"] if tiny else []
        self.llama = SMALL if tiny else LARGE
        self.rows, self.side, self.cycles = (8, 4, (1, 1)) if tiny else (768, 9, (3, 6))
        self.stack = (64, 2) if tiny else (4096, 8)  # width and layers of what is saved: 1.6 GB with its moments

    @property
    def language(self) -> list[str]:
        """Settings of the language recipe, but for its documents."""
        settings = ", ".join(f"{name}: {str(value).lower()}" for name, value in self.llama.items())
        return [
            f"model.settings={{{settings}}}", f"task.sequence={self.sequence}", "train.precision=bf16", "data=corpus",
            "data.held_out=0",
        ]  # fmt: skip

    @property
    def puzzles(self) -> list[str]:
        """Settings of the puzzles recipe: TRM-MLP as published, or tiny."""
        clues = {4: "[6,8]", 9: "[30,34]"}[self.side]
        return [
            "model=tiny" if self.tiny else "model=trm_mlp", f"model.h_cycles={self.cycles[0]}",
            f"model.l_cycles={self.cycles[1]}", f"data.side={self.side}", f"data.clues={clues}",
            f"data.puzzles={2 * self.rows}", "data.held_out=8", f"train.global_batch={self.rows}",
            "train.precision=bf16", "optim.lr=1e-4",
        ]  # fmt: skip


def jobs(device: str, sizes: Sizes, folder: Path) -> Iterator[list[Row]]:
    """What is measured, in lists of what shares a process, the most wanted first."""

    def train(recipe: str, words: list[str], *more: str, traced: bool = False) -> Callable[[], Figures]:
        return lambda: trained(recipe, device, [*words, *more], sizes.steps, traced)

    loss, batch = "language, bf16", f"train.global_batch={sizes.batch}"
    whole = [*sizes.language, f"data.path={folder / LONG}"]
    # Its documents do not fill rows, so what keeps them apart costs something: the kernel that skips what it masks.
    packed = [*sizes.language, f"data.path={folder / SHORT}", "data.packing={method: online}", batch]
    kernel = "flash" if importlib.util.find_spec("flash_attn") else "flex"
    packed += [f"model.attention={kernel}"] if device != "cpu" else []
    bare = bare_loops.language(device, sizes.llama, VOCABULARY, (sizes.batch, sizes.sequence), sizes.steps)
    yield [
        (loss, "a bare loop, eager", 16, lambda: next(bare)),
        (loss, "a bare loop, blocks compiled", 16, lambda: next(bare)),
    ]
    compiled = "layout.compile=true"
    yield [(loss, "unisono, compiled", 34, train("language", whole, batch, compiled, traced=True))]
    yield [(loss, "unisono, compiled, packed", 28, train("language", packed, compiled))]
    step = f"puzzles, {sizes.rows} rows of {sizes.side}×{sizes.side}, bf16"
    yield [(step, "unisono, torch compiled", 33, train("puzzles", sizes.puzzles, compiled))]
    yield [(step, "unisono, JAX", 27, train("puzzles", sizes.puzzles, "layout.engine=jax"))]
    yield [(step, f"unisono, JAX {AGAIN}", 12, train("puzzles", sizes.puzzles, "layout.engine=jax"))]
    yield [
        (step, "the published loop, eager", 13, lambda: published_puzzles(device, sizes)),
        ("samples of puzzles", "all at once, one by one", 3, lambda: samples(sizes)),
    ]
    yield [
        ("saves, 1.6 GB", "unisono, beside a DCP save", 18, lambda: saves(device, sizes)),
        ("experts of one layer, bf16", "grouped, transformers' loop", 7, lambda: experts_passes(device, sizes)),
    ]
    yield [(loss, "unisono, eager", 16, train("language", whole, batch))]
    yield [("birdsong, JAX, as typed", "unisono", 24, train("birdsong", sizes.as_typed))]
    yield [("birdsong, JAX, as typed", f"unisono {AGAIN}", 12, train("birdsong", sizes.as_typed))]
    yield [("birdsong, JAX, as typed", "a bare loop", 18, lambda: bare_loops.birdsong(sizes.as_typed, sizes.steps))]
    yield [("speech, as typed", "unisono", 13, train("speech", sizes.as_typed))]
    yield [("speech, as typed", "a bare loop", 9, lambda: bare_loops.speech(device, sizes.as_typed, sizes.steps))]
    yield [(step, f"unisono, torch compiled {AGAIN}", 12, train("puzzles", sizes.puzzles, compiled))]
    yield [(step, "unisono, torch eager", 12, train("puzzles", sizes.puzzles))]
    # Last: it finds a size of its own, and compiles nothing.
    auto = [*whole, "train.global_batch=64", "layout.micro_batch=auto"]
    yield [("layout.micro_batch=auto", "unisono", 22, lambda: trained("language", device, auto, 3))]


# how ------------------------------------------------------------------------------------------------------------------


def trained(recipe: str, device: str, words: list[str], steps: int, traced: bool = False) -> Figures:
    """A run of the command: its median step, MFU and wait for data, and when its first step was done.

    If it is `traced`, a few more steps are, and what is between them is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = [
            "layout.world_size=1", f"layout.device={device}", "eval.every=null", "checkpoint.every=null",
            "checkpoint.at_end=false", "observe.progress=false", "observe.trackers=[]", f"run.dir={folder}",
            "run.name=run", f"train.steps={steps + bare_loops.TRACED * traced}",
        ]  # fmt: skip
        if traced:
            own.append(f"observe.profile=[{steps + 1},{steps + bare_loops.TRACED}]")
        if "layout.engine=jax" in words or recipe == "birdsong":
            own[1] = "layout.device=auto"
        elif device == "cpu":
            own.append("layout.threads=1")
        run = Path(folder) / "run"
        events = run / "events.jsonl"
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
        made = [json.loads(line) for line in events.read_text("utf-8").splitlines()]
        made = [step for step in made if "loss" in step and not step.get("eval")][:steps]
        late = made[min(bare_loops.WARM, len(made) - 2) :]
        found: Figures = {"ms a step": 1e3 * statistics.median(step["seconds"] for step in late)}
        found["first step after, s"] = first
        found["data wait"] = statistics.mean(step["data_wait"] for step in late)
        if "tokens_per_second" in late[-1]:
            found["tokens a second"] = statistics.median(step["tokens_per_second"] for step in late)
        if "mfu" in late[-1]:
            found["mfu"] = statistics.median(step["mfu"] for step in late)
        if "memory_gb" in late[-1]:
            found["peak, GB"] = max(step["memory_gb"] for step in made)
        if traced:
            from benchmarks.trace_gaps import between_steps
            from unisono.observe.profile import read_trace

            found |= between_steps(read_trace(run / "profile" / "rank-00000.trace.json.gz"))
        return found


def published_puzzles(device: str, sizes: Sizes) -> Figures:
    """The loop as it was published, with the model of `sizes`."""
    model = {"mixer": "mlp", "positions": "none", "h_cycles": sizes.cycles[0], "l_cycles": sizes.cycles[1]}
    if sizes.tiny:
        model |= {"width": 64, "heads": 4, "prefix": 4, "embedding": 64, "inner_multiple": 32}
    return bare_loops.puzzles(device, sizes.side, sizes.rows, model, sizes.steps)


def saves(device: str, sizes: Sizes) -> Figures:
    """How long a save keeps training waiting, and how long one of torch.distributed.checkpoint does, of one process.

    Each is the second of its run, which no longer asks for memory. What the step after it takes longer is counted too:
    on an accelerator it waits for the copies.
    """
    from benchmarks import checkpoint
    from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess

    seconds = []
    for name in ("Unisono", "DCP `save`"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = checkpoint.make_trainer(ProcessInfo(), SingleProcess(), Path(folder), *sizes.stack, device)
            seen = checkpoint.save_twice(checkpoint.CONTENDERS[name](trainer))
        longer = seen["window"][1][0] - statistics.median(seen["steps"])
        seconds.append(seen["blocked"][1] + max(0.0, longer))
    ours, dcp = seconds
    return {"blocked ms, unisono": 1e3 * ours, "blocked ms, DCP": 1e3 * dcp, "of a DCP save": ours / dcp}


def samples(sizes: Sizes) -> Figures:
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


def experts_passes(device: str, sizes: Sizes) -> Figures:
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


def describe_host() -> Figures:
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


def write_documents(folder: Path, sizes: Sizes) -> None:
    """The same text twice: two documents that fill rows but for their last, and many of a corpus's usual lengths."""
    from benchmarks.packing import lognormal

    size = 200_000 if sizes.tiny else 2_000_000
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text("utf-8", errors="replace") for path in modules)[:size]
    short = (CHARACTERS * lognormal(size // 10) * sizes.sequence // 2048).clip(min=8)  # more than the text has
    ends = [0, *(end for end in short.cumsum() if end < len(text)), len(text)]
    parts = {LONG: [text[: len(text) // 2], text[len(text) // 2 :]], SHORT: [text[a:b] for a, b in pairwise(ends)]}
    for name, documents in parts.items():
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def measure(job: list[Row]) -> None:
    """Print the figures of each row, in the process of the job."""
    for *_, how in job:
        try:
            figures = how()
        except Exception as error:
            traceback.print_exc()
            figures = {"not measured": f"{type(error).__name__}: {error}"[:200]}
        print(ROW + json.dumps(figures), flush=True)


def run_job(command: list[str], limits: Iterable[float]) -> Iterator[Figures]:
    """The rows that a process prints; if one takes longer than its limit in seconds, all is killed, children too.

    The limit of a row is asked for when it begins.
    """
    # A session of its own: a run that it has started would keep the GPU busy for the rows after it.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=checkout.ROOT, start_new_session=True
        ) as process,
    ):
        rows: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        reading = threading.Thread(target=_read_rows, args=(process.stdout, rows))
        reading.start()
        over: Figures | None = None
        try:
            for limit in limits:
                if over is not None:
                    yield over
                    continue
                try:
                    row = rows.get(timeout=limit)
                except queue.Empty:
                    _kill(process)
                    yield {"not measured": f"its time was over after {limit:.0f} s"}
                    over = {"not measured": "its process was over, with the row before it"}
                    continue
                if row is None:
                    code = process.wait()
                    errors.seek(0)
                    why = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1][:200]
                    over = {"not measured": why}
                yield over if row is None else json.loads(row)
        finally:
            _kill(process)
            reading.join()


def _read_rows(output: IO[str], rows: queue.SimpleQueue[str | None]) -> None:
    for line in output:
        if line.startswith(ROW):
            rows.put(line.removeprefix(ROW))
    rows.put(None)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def format_value(name: str, value: Any) -> str:
    """A figure with its unit."""
    if value is None or isinstance(value, str):
        return f"{name}: {value or 'unknown'}"
    return f"{name} {100 * value:.1f} %" if name in SHARES else f"{name} {value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run all of the code on the smallest sizes")
    parser.add_argument("--seconds", type=float, help="of all rows, on a GPU 345; what has no time is named")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.tiny)
    on_cpu = arguments.device == "cpu"
    total = arguments.seconds or (math.inf if on_cpu else TOTAL)
    least = LEAST_ON_CPU if on_cpu else LEAST
    if arguments.job is not None:
        measure(list(jobs(arguments.device, sizes, arguments.folder))[arguments.job])
        return
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as folder:
        if missing := checkout.prepare(Path(folder)):
            sys.exit(f"{', '.join(missing)} cannot be imported here: see `make gpu-wheels`")
        os.environ.update({name: f"{folder}/{name}" for name in CACHES})
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # else it would be used instead of ours
        write_documents(Path(folder), sizes)
        host, began, found = describe_host(), time.monotonic(), []

        def left() -> float:
            return total - (time.monotonic() - began)

        print(f"{host}\n\n| group | what | figures |\n|---|---|---|", flush=True)
        for number, job in enumerate(jobs(arguments.device, sizes, Path(folder))):
            command = [sys.executable, "-m", "benchmarks.gpu", f"--job={number}", f"--device={arguments.device}"]
            command += [f"--folder={folder}", *(["--tiny"] if arguments.tiny else [])]

            # One that hangs leaves time for others.
            limits = (max(1.0, min(left(), max(least, 2 * seconds))) for _, _, seconds, _ in job)
            measured = run_job(command, limits) if left() > 5 else repeat({"not measured": "no time was left"})
            for figures, (group, what, _, _) in zip(measured, job, strict=False):
                found.append({"group": group, "what": what, **figures})
                shown = ", ".join(format_value(name, value) for name, value in figures.items())
                print(f"| {group} | {what} | {shown} |", flush=True)
                if arguments.out:
                    text = json.dumps({"host": host, "seconds": time.monotonic() - began, "rows": found}, indent=1)
                    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
