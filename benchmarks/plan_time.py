"""Seconds that `unisono plan` takes, of one core, for a device or two and for thousands.

    python -m benchmarks.plan_time [CASE …]

Each case is a process of its own, one after the other. Both seconds of the processor and by the clock are of the plan
alone, after the imports and the preparation of the data; its search is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from benchmarks import checkout

LLAMA_8B = (
    "model.settings={hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, "
    "num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192, tie_word_embeddings: false}"
)
LARGE = [LLAMA_8B, "task.sequence=8192", "train.precision=bf16", "data.packing={method: concatenate}"]
CASES: dict[str, tuple[str, str, list[str]]] = {  # hardware, recipe, settings
    "language, 64 devices, 1 row each": ("h100x64", "language", ["train.global_batch=64"]),
    "language, 64 devices, 8,192 rows each": ("h100x64", "language", ["train.global_batch=524288"]),
    "language, 4,096 devices, 1 row each": ("h100x4096", "language", ["train.global_batch=4096"]),
    "language, 4,096 devices, 1,024 rows each": ("h100x4096", "language", ["train.global_batch=4194304"]),
    "language, 8 B, 1 device": ("h100x1", "language", [*LARGE, "train.global_batch=1"]),
    "language, 8 B, 8 devices": ("h100x8", "language", [*LARGE, "train.global_batch=16", "layout.strategy=fsdp"]),
    "language, 8 B, 4,096 devices": (
        "h100x4096", "language", [*LARGE, "train.global_batch=8192", "layout.strategy=fsdp"],
    ),
    "microbiome, 64 devices": ("h100x64", "microbiome", ["train.global_batch=64"]),
    "microbiome, 4,096 devices": ("h100x4096", "microbiome", ["train.global_batch=32768"]),
    "puzzles in JAX, 64 devices": ("h100x64", "puzzles", ["train.global_batch=4096", "layout.engine=jax"]),
    "puzzles in JAX, 4,096 devices": ("h100x4096", "puzzles", ["train.global_batch=4096", "layout.engine=jax"]),
    "puzzles in torch, 64 devices": ("h100x64", "puzzles", ["train.global_batch=64", "layout.engine=torch"]),
}  # fmt: skip


def measure(case: str) -> dict[str, float]:
    """Seconds of one plan in this process: of the processor, and by the clock."""
    from unisono.task import run_setup
    from unisono.task_config import build_task, load_config
    from unisono_plan.plan import PlanSettings, make_plan

    hardware, recipe, words = CASES[case]
    config = load_config(recipe, words)[0]
    run_setup(build_task(config))  # data that is prepared once
    before, began = time.process_time(), time.perf_counter()
    make_plan(config, PlanSettings.model_validate({"hardware": hardware}))
    return {"processor": time.process_time() - before, "clock": time.perf_counter() - began}


def main() -> None:
    """Measure cases, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for case in arguments.cases or CASES:
        if case not in CASES:
            parser.error(f"{case}: no such case; known: {'; '.join(CASES)}")
    if arguments.in_process:
        print(json.dumps(measure(arguments.cases[0])))
        return
    print(f"{'':44}{'processor':>12}{'clock':>10}   seconds; {os.cpu_count()} cores")
    for case in arguments.cases or CASES:
        words = [sys.executable, "-m", "benchmarks.plan_time", "--in-process", case]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=checkout.ROOT)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{case:44}{found['processor']:12.0f}{found['clock']:10.0f}", flush=True)


if __name__ == "__main__":
    main()
