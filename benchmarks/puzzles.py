"""The puzzles recipe, measured: what it learns, and what its steps cost beside a plain port of the published loop.

    python -m benchmarks.puzzles learning [--engines torch jax] [--seeds 0 1 2] [--variants default …] [--steps 1000]
    python -m benchmarks.puzzles steps [--precision fp32] [--steps 20] [--repeats 3] [--width 512 --side 9 --rows 16]
    python -m benchmarks.puzzles samples [--side 9 --rows 768 --repeats 20]
    python -m benchmarks.puzzles attention [--repeats 5]
    python -m benchmarks.puzzles needed

`learning` trains the embedded 6×6 Sudokus and tells, for puzzles that the run never saw, how many are solved. `steps`
runs the same model on the same machine in turns, each in a process of its own on one core: both engines, JAX with
several devices, and the loop as it was published (eager, one number read from the device per step, fp64 loss over the
batch, examples thrown away by rows that have not halted), which runs twice to tell what two equal things differ by. A
last line is a bound: the matrix products of the published step alone, of the same shapes and strides, one after the
other. Nothing that computes them with torch's library is faster than that line.
`samples` builds micro-batches, one by one and all at once, without and with the checksums of the ledger.
`attention` is one layer, dense and over row, column and box, forward and backward, for 81 and for 900 cells. `needed`
computes what a published figure would take. Seconds of the processor are told beside those of the clock, since a
machine that others use makes the latter say little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

VARIANTS: dict[str, list[str]] = {
    "default": [],
    "always 8 steps": ["task.weights.halt=0"],  # the halting head stays where it begins: never
    "curriculum": ["schedules.l_cycles={kind: constant, peak: 2, start: 0.5, warmup: 0.3}"],
    "one cycle": ["model.h_cycles=1", "model.l_cycles=1"],
}
PUBLISHED = "published loop"
PRODUCTS = "its matrix products alone"
# What is measured by `steps`: keys of the group `layout`, of which the loop as published has none.
CONTENDERS: dict[str, dict[str, Any]] = {
    PUBLISHED: {},
    "published loop again": {},
    "torch": {"engine": "torch"},
    "torch compiled": {"engine": "torch", "compile": True},
    "jax": {"engine": "jax"},
    **{f"jax, {n} devices": {"engine": "jax", "devices": n, "strategy": "ddp"} for n in (2, 4, 8)},
    PRODUCTS: {},
}
WARM = 3  # steps before anything is measured


# learning -------------------------------------------------------------------------------------------------------------


def learning(engines: list[str], seeds: list[int], variants: list[str], steps: int, words: list[str]) -> None:
    """A line per run, and mean and spread over seeds."""
    for engine in engines:
        for variant in variants:
            results = []
            for seed in seeds:
                figures = trained(engine, steps, [f"run.seed={seed}", *VARIANTS[variant], *words])
                results.append(figures["ema/exact"])
                print(
                    f"{engine}, {variant}, seed {seed}: exact {figures['exact']:.3f}, of the average "
                    f"{figures['ema/exact']:.3f}, with halting {figures['ema/halting/exact']:.3f} after "
                    f"{figures['ema/halting/steps']:.1f} steps; {figures['processor']:.0f} s of processor",
                    flush=True,
                )
            spread = f" ± {statistics.stdev(results):.3f}" if len(results) > 1 else ""
            print(f"{engine}, {variant}: {statistics.mean(results):.3f}{spread}", flush=True)


def trained(engine: str, steps: int, words: list[str]) -> dict[str, float]:
    """The last evaluation of a run by the command, in a process of its own, and what it took of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"layout.engine={engine}", "layout.world_size=1", f"train.steps={steps}", f"eval.every={steps}"]
        own += [f"checkpoint.every={steps}", f"run.dir={folder}", "run.name=run", "observe.progress=false"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "unisono", "train", "puzzles", *own, *words], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    last: dict[str, float] = [line for line in lines if line.get("eval")][-1]
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**last, "processor": cpu_seconds}


# steps ----------------------------------------------------------------------------------------------------------------


def task_of(engine: str, side: int, rows: int, model: dict[str, Any], **more: Any) -> Any:
    from unisono.task_config import find_task
    from unisono_puzzles import settings

    many = {4: (6, 8), 6: (10, 14), 9: (30, 34)}[side]
    data = settings.EmbeddedData(
        kind="embedded",
        side=side,
        puzzles=4 * rows,
        held_out=1,
        clues=many,
        **more,  # type: ignore[arg-type]
    )
    task = find_task("puzzles", engine)(settings.PuzzlesConfig(), model=settings.Model(**model), data=data)
    task.setup()
    return task


def batches(task: Any, rows: int) -> Iterator[dict[str, Any]]:
    from unisono.runtime.rng import generator
    from unisono.task import SampleContext

    source, at = task.data(), 0
    while True:
        chosen = [source[(at + row) % len(source)] for row in range(rows)]
        samples = [task.sample(one, SampleContext(generator("bench", at, row), True)) for row, one in enumerate(chosen)]
        at += rows
        yield task.collate(samples)


def clocks() -> tuple[float, float]:
    """Seconds of the clock and of this process's processor."""
    return time.perf_counter(), time.process_time()


def published(task: Any, rows: int, steps: int, precision: str, device: str = "cpu") -> Iterator[tuple[float, float]]:
    """The clocks before each step of the loop as it was published, with the same model and the same optimizers.

    In bf16 every product casts its weights, as the published layers do.
    """
    import torch

    from unisono.optim.adam_atan2 import AdamAtan2
    from unisono.optim.sign_sgd import RowSignSgd
    from unisono_puzzles.batches import fields_of
    from unisono_puzzles.model import act

    torch.manual_seed(0)
    model, config = task.build().to(device), task.model_config
    embeddings = [p for name, p in model.named_parameters() if name.endswith("puzzles.weight")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("puzzles.weight")]
    optimizers = [AdamAtan2(rest, lr=1e-4, weight_decay=1.0), RowSignSgd(embeddings, lr=1e-4, weight_decay=1.0)]
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    source, carry = batches(task, rows), None
    for _ in range(steps):
        yield clocks()
        arrays = next(source)
        batch = {name: torch.as_tensor(value).to(device) for name, value in fields_of(arrays, "sudoku").items()}
        if carry is None:
            carry = {name.split("/")[1]: value for name, value in task.initial_carry(
                {f"sudoku/{name}": value for name, value in batch.items()}).items()}  # fmt: skip
        work = act.begin(carry, batch, model.starts)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            step = model("sudoku", work, config.h_cycles, config.l_cycles)
        answers = work["answer"].long()
        logits = step.logits.double()
        stable = torch.where(logits < 0, 1 / (1 - logits + 1e-30), logits + 1)
        share = stable.gather(-1, answers[..., None])[..., 0] / stable.sum(-1)
        right = (step.logits.argmax(-1) == answers).all(-1).double()
        halt = torch.nn.functional.binary_cross_entropy_with_logits(step.q[:, 0].double(), right, reduction="sum")
        loss = -share.log().mean(-1).sum() + 0.5 * halt
        (loss / rows).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 1e-3)
        halted = act.halt(work, step.q.detach(), batch, 0.1, 16, competing=False)
        states = {name: value.detach() for name, value in step.states.items()}
        carry = {**{name: work[name] for name in act.PUZZLE}, **states, **halted}
        _ = loss.item(), halted["halted"].sum().item(), right.sum().item()
    yield clocks()


def matrix_products(task: Any, rows: int, steps: int, precision: str) -> Iterator[tuple[float, float]]:
    """The clocks before each repetition of the matrix products that a step of the published loop makes, and no more."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[Any, list[Any]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in products:
                self.calls.append((func, [(tuple(one.shape), one.stride(), one.dtype) for one in args]))
            return func(*args, **(kwargs or {}))

    loop = published(task, rows, 2, precision)
    next(loop)
    next(loop)
    with Recorder() as recorder:
        next(loop)
    assert recorder.calls
    like: dict[Any, torch.Tensor] = {}
    for _, operands in recorder.calls:
        for shape, stride, dtype in operands:
            reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            like.setdefault((shape, stride, dtype), torch.randn(reach).to(dtype).as_strided(shape, stride))
    calls = [(func, [like[operand] for operand in operands]) for func, operands in recorder.calls]
    with torch.no_grad():
        for _ in range(steps):
            yield clocks()
            for func, operands in calls:
                func(*operands)
        yield clocks()


def of_engine(
    task: Any, rows: int, steps: int, layout: dict[str, Any], precision: str
) -> Iterator[tuple[float, float]]:
    """The clocks before each step of an engine, which has the loss of the last one by then."""
    from packages.unisono.tests.runs import configuration
    from unisono.config.batch_split import BatchSplit
    from unisono.data.loading.loader import Loader
    from unisono.data.order.planning import build_plan
    from unisono.engines import create_engine
    from unisono.engines.protocol import EngineJob
    from unisono.optim.schedules import ScheduledScalars
    from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess

    groups = [{"match": "kinds.*.puzzles.weight", "rule": "sign_sgd", "weight_decay": 1.0}]
    config = configuration(
        layout={"devices": 1, "threads": None, **layout},
        train={
            "steps": steps,
            "global_batch": rows,
            "clip_norm": None,
            "guard_every": 10**9,
            "precision": precision,
        },
        optim={"kind": "adam_atan2", "lr": 1e-4, "weight_decay": 1.0, "groups": groups},
        ema={"decay": 0.999},
    )
    source, devices = task.data(), config.layout.devices_each
    split = BatchSplit.create(rows, 1, rows // devices, devices)
    plan = build_plan(task, source, config, 1)
    loader, scalars = Loader(task, source, plan, split, 0), ScheduledScalars(config, steps)
    engine = create_engine(EngineJob(task, config, ProcessInfo(), SingleProcess(), split))
    try:
        engine.setup(next(iter(loader.steps())), scalars(0))
        for step, batches in enumerate(engine.incoming(loader.steps())):
            yield clocks()
            engine.step(batches, step, scalars(step))
        yield clocks()
    finally:
        loader.close()
        engine.close()


def one_contender(name: str, side: int, rows: int, steps: int, model: dict[str, Any], precision: str) -> None:
    """Measure one of them in this process, on one core, and print what came out as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    layout, (began, _) = CONTENDERS[name], clocks()
    if layout.get("engine") == "jax":  # before JAX looks for devices
        import jax

        jax.config.update("jax_num_cpu_devices", layout.get("devices", 1))
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="puzzles-"))  # each turn compiles
    task = task_of(layout.get("engine", "torch"), side, rows, model)
    if layout:
        every = list(of_engine(task, rows, steps, layout, precision))
    else:
        every = list((matrix_products if name == PRODUCTS else published)(task, rows, steps, precision))
    measured = every[WARM:]
    result = {
        "wall": [after[0] - before[0] for before, after in pairwise(measured)],
        "processor": [after[1] - before[1] for before, after in pairwise(measured)],
        "until": every[1][0] - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(result))


def step_times(
    contenders: list[str], side: int, rows: int, steps: int, repeats: int, width: int, precision: str
) -> None:
    """Medians of all contenders in turns, a process for each turn."""
    from unisono_puzzles.model.shape import step_flops

    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name in contenders:
            words = ["--contenders", name, "--side", side, "--rows", rows, "--steps", steps, "--width", width]
            words += ["--precision", precision]
            command = [sys.executable, "-m", "benchmarks.puzzles", "contender", *map(str, words)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    task = task_of("torch", side, rows, model_of(width))
    config = task.model_config
    flops = rows * step_flops(task.kinds["sudoku"], config, config.h_cycles, config.l_cycles)

    def middle(name: str, quantity: str) -> float:
        return statistics.median([value for one in results[name] for value in one[quantity]])

    print(
        "| | processor ms a step | ms a step | times as fast (processor) | GFLOP/s of processor | s to the second step "
        "| peak MB |\n|---|---|---|---|---|---|---|"
    )
    for name, turns in results.items():
        processor = middle(name, "processor")
        ratio = middle(contenders[0], "processor") / processor
        until, peak = (statistics.median([one[figure] for one in turns]) for figure in ("until", "peak"))
        print(
            f"| {name} | {processor * 1e3:.0f} | {middle(name, 'wall') * 1e3:.0f} | {ratio:.2f} | "
            f"{flops / processor / 1e9:.1f} | {until:.0f} | {peak:.0f} |",
            flush=True,
        )


def model_of(width: int) -> dict[str, Any]:
    """TRM-MLP as published, of another width."""
    return {"mixer": "mlp", "positions": "none", "width": width}


# attention ------------------------------------------------------------------------------------------------------------


def attention(repeats: int) -> None:
    """One layer's attention, dense and sparse, on one core: milliseconds, memory for the backward pass, FLOPs."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch

    from unisono_puzzles.data.formats import maze_format, sudoku_format
    from unisono_puzzles.model.shape import Kind, net_flops
    from unisono_puzzles.model.torch_model import Attention
    from unisono_puzzles.settings import Model

    print(
        "| cells | rows | attention | processor ms | ms | kept for the backward pass, MB | GFLOP of a network "
        "|\n|---|---|---|---|---|---|---|"
    )
    for format_, rows in ((sudoku_format(9), 16), (maze_format(30, 30), 2)):
        kinds = {"puzzle": Kind(format_, 1)}
        contenders: dict[str, tuple[Callable[[], None], Model]] = {}
        kept: dict[str, int] = {}
        for mixer in ("attention", "sparse"):
            model = Model(mixer=mixer)  # type: ignore[arg-type]
            layer = Attention(model, kinds)
            x = torch.randn(rows, format_.length + model.prefix, model.width, requires_grad=True)

            def once(layer: Any = layer, x: Any = x, mixer: str = mixer, kept: dict[str, int] = kept) -> None:
                sizes: dict[int, int] = {}

                def pack(tensor: torch.Tensor) -> torch.Tensor:
                    sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    out = layer(x, "puzzle", None)
                kept[mixer] = sum(sizes.values())
                out.sum().backward()

            contenders[mixer] = once, model
        times: dict[str, list[tuple[float, float]]] = {mixer: [] for mixer in contenders}
        for number in range(repeats + 1):
            for mixer, (once, _) in contenders.items():
                began = clocks()
                once()
                if number:
                    ended = clocks()
                    times[mixer].append((ended[1] - began[1], ended[0] - began[0]))
        for mixer, (_, model) in contenders.items():
            flops = net_flops(kinds["puzzle"], model) * rows / 1e9
            name = "dense" if mixer == "attention" else mixer
            processor, wall = (statistics.median(values) * 1e3 for values in zip(*times[mixer], strict=True))
            print(
                f"| {format_.length} | {rows} | {name} | {processor:.0f} | {wall:.0f} | {kept[mixer] / 1e6:.0f} "
                f"| {flops:.1f} |",
                flush=True,
            )


# samples --------------------------------------------------------------------------------------------------------------


def samples(side: int, rows: int, repeats: int) -> None:
    """Milliseconds of one thread for a micro-batch; the fastest of `repeats`, in turns."""
    from unisono.data.loading.batch_builder import BatchBuilder
    from unisono.data.loading.micro_batch import Request
    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan

    print("| augmentations | ledger | one by one: ms | all at once: ms | read + sample + collate: ms |")
    print("|---|---|---|---|---|")
    for augmentations in (None, 1000):
        task = task_of("torch", side, rows, {}, augmentations=augmentations)
        source = task.data()
        plan = StreamPlan.create(Order(len(source), 0), rows, repeats + 1, None)
        for contents in (False, True):
            times: dict[bool, list[tuple[float, tuple[float, float, float]]]] = {False: [], True: []}
            builders = {way: BatchBuilder(task, source, 0, "train", contents=contents, together=way) for way in times}
            for step in range(repeats + 1):
                request = Request(0, range(rows), plan.samples(step, range(rows)))
                for way, builder in builders.items():
                    began = time.thread_time()
                    info = builder.make(request).info
                    assert info is not None
                    times[way].append((time.thread_time() - began, info.seconds))
            alone, (together, parts) = (min(times[way][1:]) for way in (False, True))
            shown = " + ".join(f"{1e3 * seconds:.1f}" for seconds in parts)
            print(
                f"| {augmentations or 'any'} | {'yes' if contents else 'no'} | {1e3 * alone[0]:.1f} "
                f"| {1e3 * together:.1f} | {shown} |",
                flush=True,
            )


# what a published figure would need -----------------------------------------------------------------------------------


def needed() -> None:
    """What 17 ms a step on a TPU v4-64 would take, and what its chips allow; computed, not measured."""
    from unisono_puzzles.data.formats import sudoku_format
    from unisono_puzzles.model.shape import Kind, net_flops, step_flops
    from unisono_puzzles.settings import Model

    kind, peak, rows, claimed = Kind(sudoku_format(9), 1), 32 * 275e12, 6144, 0.017
    print(
        "| model | GFLOP a pass of the network | GFLOP a puzzle and step | TFLOP a step of 6144 | ms at 100 % | at 40 "
        "% | peak that 17 ms needs |\n|---|---|---|---|---|---|---|"
    )
    for name, model in (("TRM-MLP", Model(mixer="mlp", positions="none")), ("TRM-Att", Model())):
        one, step = net_flops(kind, model), step_flops(kind, model, model.h_cycles, model.l_cycles)
        least = step * rows / peak
        print(
            f"| {name} | {one / 1e9:.2f} | {step / 1e9:.1f} | {step * rows / 1e12:.0f} | {least * 1e3:.0f} "
            f"| {least / 0.4 * 1e3:.0f} | {least / claimed:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["learning", "steps", "contender", "samples", "attention", "needed"])
    parser.add_argument("--engines", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--side", type=int, default=9, choices=[4, 6, 9])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="the published loop's is bf16")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("words", nargs="*", default=[], help="settings of the runs, key=value")
    arguments = parser.parse_args()
    if arguments.part == "learning":
        learning(arguments.engines, arguments.seeds, arguments.variants, arguments.steps or 1000, arguments.words)
    elif arguments.part == "steps":
        sizes = arguments.side, arguments.rows, arguments.steps or 20, arguments.repeats, arguments.width
        step_times(arguments.contenders, *sizes, arguments.precision)
    elif arguments.part == "contender":
        sizes = arguments.side, arguments.rows, arguments.steps or 20
        one_contender(arguments.contenders[0], *sizes, model_of(arguments.width), arguments.precision)
    elif arguments.part == "samples":
        samples(arguments.side, arguments.rows, arguments.repeats)
    elif arguments.part == "attention":
        attention(arguments.repeats)
    else:
        needed()


if __name__ == "__main__":
    main()
