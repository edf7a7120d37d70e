"""Training loops as one writes them by hand, on any device: what `benchmarks.gpu` has beside Unisono's runs.

The Llama's loop is by hand throughout, and the puzzles' is the published one. Those of birdsong and speech call the
recipe's own `outputs` and `loss`, so what they leave out is the toolkit. Their batches are built before the clock runs
and begin again, so they never wait for data.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

WARM = 5  # steps before anything is measured
TRACED = 3  # steps that are recorded, after all that are measured
BATCHES = 8  # that are built ahead, of other rows each


def timed(device: str, steps: Iterator[None]) -> dict[str, Any]:
    """The median step of a loop that yields before each step and after the last."""
    import torch

    times = []
    for _ in steps:
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter())
    return median_step(times)


def median_step(times: Sequence[float]) -> dict[str, Any]:
    """Of the clock before each step and after the last, without the first steps."""
    each = [after - before for before, after in pairwise(times)]
    return {"ms a step": 1e3 * statistics.median(each[min(WARM, len(each) - 1) :])}


def language(
    device: str, llama: dict[str, Any], vocabulary: int, shape: tuple[int, int], steps: int
) -> Iterator[dict[str, Any]]:
    """A Llama in bf16: autocast, fused AdamW, clipping, one number read from the device per step.

    The same model twice, eager and then with compiled blocks; the last steps of the second are traced.
    """
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.trace_gaps import between_steps
    from unisono.engines.torch.profiler import TorchProfiler
    from unisono.observe.profile import read_trace

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**llama, vocab_size=vocabulary, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rows, length = shape
    profiler = TorchProfiler(torch.device(device))

    def loop(steps: int) -> Iterator[None]:
        for _ in range(steps):
            yield
            with profiler.part("step"):
                tokens = torch.randint(vocabulary, (rows, length + 1)).to(device, non_blocking=True)
                with torch.autocast(device, torch.bfloat16):
                    logits = model(input_ids=tokens[:, :-1]).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                _update(model, optimizer, loss)
        yield

    yield timed(device, loop(steps))
    for block in model.model.layers:
        block.compile()
    found = timed(device, loop(steps))
    profiler.start()
    for _ in loop(TRACED):
        pass
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "profile", "trace.json.gz")
        profiler.stop(trace)
        yield found | between_steps(read_trace(trace))


def speech(device: str, words: Sequence[str], steps: int) -> dict[str, Any]:
    """A Higgs Audio of the recipe in fp32: fused AdamW, clipping, one number read from the device per step."""
    import torch

    from unisono import Context

    task, config, batches = _recipe("speech", words)
    torch.manual_seed(0)
    model, context = task.build().to(device), Context(0, training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)

    def loop() -> Iterator[None]:
        for arrays in islice(cycle(batches), steps):
            yield
            batch = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
            loss = _mean(task.loss(task.outputs(model, batch, context), batch, context), task.counts(arrays))
            _update(model, optimizer, loss)
        yield

    return timed(device, loop())


def birdsong(words: Sequence[str], steps: int) -> dict[str, Any]:
    """An encoder of the recipe in fp32, in JAX: one jitted step, its state donated, one number read per step.

    Beside the median step there are the seconds until the first one was done, compilation and all.
    """
    began = time.perf_counter()
    import equinox as eqx
    import jax
    import optax

    from unisono import Context

    jax.config.update("jax_default_matmul_precision", "highest")  # as `train.precision=fp32`
    task, config, batches = _recipe("birdsong", words)
    trained, rest = eqx.partition(eqx.filter_jit(task.build)(jax.random.key(0)), eqx.is_inexact_array)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.optim.lr))
    state, counts = jax.jit(optimizer.init)(trained), task.counts(batches[0])

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(trained: Any, state: Any, batch: Any, key: Any) -> Any:
        context = Context(0, training=True, key=key)

        def loss(trained: Any) -> Any:
            model = eqx.combine(trained, rest)
            return _mean(task.loss(task.outputs(model, batch, context), batch, context), counts)

        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, value

    times: list[float] = []
    for number, batch in enumerate(islice(cycle(batches), steps)):
        times.append(time.perf_counter())
        trained, state, value = step(trained, state, batch, jax.random.key(number))
        float(value)
    times.append(time.perf_counter())
    return {**median_step(times), "first step after, s": times[1] - began}


def puzzles(device: str, side: int, rows: int, model: dict[str, Any], steps: int) -> dict[str, Any]:
    """The loop as it was published, in bf16; see `benchmarks.puzzles`."""
    from benchmarks import puzzles

    task = puzzles.task_of("torch", side, rows, model)
    return timed(device, (None for _ in puzzles.published(task, rows, steps, "bf16", device)))


def _recipe(name: str, words: Sequence[str]) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The task of a recipe, its configuration, and batches of its first rows, each of `train.global_batch`."""
    from benchmarks.puzzles import batches
    from unisono.task_config import build_task, load_config

    config = load_config(name, words)[0]
    task = build_task(config)
    task.setup()
    return task, config, list(islice(batches(task, config.train.global_batch), BATCHES))


def _update(model: Any, optimizer: Any, loss: Any) -> None:
    """What every loop in torch does with its loss: clipping, and one number read from the device."""
    import torch

    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()


def _mean(found: Any, counts: dict[str, float]) -> Any:
    """The loss of a batch, of its terms' sums; in JAX a term may be given by row."""
    return sum(found.weights.get(name, 1.0) * one.sum() / max(1.0, counts[name]) for name, one in found.sums.items())
