"""Unisono beside other trainers: step time, time to the first step, memory, lines, and how far gradients are off.

    python -m benchmarks.peers [--rounds 5] [--steps 30] [--processes 1 2] [--write]

Every contender is a script in `benchmarks/contenders` as its library's guide would have it, trains the same Llama from
the same weights on the same rows in the same order with AdamW, two micro-batches per update and clipping, and runs in
processes of its own, in turn with the others. The bare loop, by hand and right, stands twice in every round: the A/A
interval is what two equal things differ by on this machine. Times are taken by a hook around the optimizer's step.

The gradients of the first update, whose rows have very different numbers of targets, are held against those of the
whole batch at once on one process, in fp64. torchtitan has no place in it: without an accelerator it takes its
device for `cuda`, and ends with that.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page

HERE = Path(__file__).parent
CONTENDERS = {
    "bare loop": "bare.py",
    "bare loop again": "bare.py",
    "Unisono": "unisono_task.py",
    "Hugging Face Trainer": "hf_trainer.py",
    "Accelerate": "with_accelerate.py",
    "Lightning Fabric": "with_fabric.py",
}
MODEL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
BATCH, ACCUMULATE, LENGTH, SEED = 16, 2, 128, 0
WARM_UP = 3  # updates that are not timed


def prepare(folder: Path, steps: int, gradients: bool) -> None:
    """Write settings, weights and rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from unisono.data.order.order import Order

    clip = 1e9 if gradients else 1.0  # a gradient that is clipped no longer says how long it was
    settings = {"batch": BATCH, "accumulate": ACCUMULATE, "steps": steps, "clip": clip, "gradients": gradients}
    (folder / "settings.json").write_text(json.dumps(settings))
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    with torch.no_grad():
        for parameter in model.parameters():  # no two tensors alike: they are recognised by what is in them
            parameter.add_(1e-3 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(MODEL["vocab_size"], size=(steps * BATCH, LENGTH))
    lengths = rng.integers(2, LENGTH, size=(steps * BATCH, 1), endpoint=True)
    labels = np.where(np.arange(LENGTH) < lengths, tokens, -100)
    order = Order(len(tokens), SEED)(np.arange(len(tokens)))
    np.savez(folder / "rows.npz", input_ids=tokens, labels=labels)
    back = np.argsort(order)
    np.savez(folder / "rows_of_order.npz", input_ids=tokens[back], labels=labels[back])


def command(file: str, processes: int, folder: Path, steps: int, clip: float) -> list[str]:
    """What a user types to start a contender."""
    path = str(HERE / "contenders" / file)
    if file == "unisono_task.py":
        return [
            sys.executable, "-m", "unisono", "train", f"{path}:Peer", f"layout.world_size={processes}",
            "layout.device=cpu", f"layout.micro_batch={BATCH // ACCUMULATE // processes}", f"train.steps={steps}",
            f"train.global_batch={BATCH}", f"train.clip_norm={clip}", "optim.lr=1e-3", "optim.weight_decay=0",
            "schedules=constant", "schedules.lr.warmup=0", f"run.seed={SEED}", f"run.dir={folder / 'runs'}",
            "checkpoint.at_end=false",
        ]  # fmt: skip
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    return [sys.executable, *many, path]


def train(name: str, processes: int, folder: Path, steps: int, gradients: bool) -> dict[str, float]:
    """Run a contender to its end; returns seconds and megabytes."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    more = {"PEERS": str(folder), "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    clip = 1e9 if gradients else 1.0
    began = time.time()
    words = command(CONTENDERS[name], processes, folder, steps, clip)
    done = subprocess.run(words, env={**clean, **more}, capture_output=True, text=True)
    ranks = [folder / f"rank-{rank}.json" for rank in range(processes)]
    if done.returncode or not all(rank.exists() for rank in ranks):
        raise SystemExit(f"{name} on {processes}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    seen = [json.loads(rank.read_text()) for rank in ranks]
    for rank in ranks:
        rank.unlink()
    return {
        "first": max(rank["times"][0] for rank in seen) - began,
        "step": float(np.median(np.diff(seen[0]["times"])[WARM_UP - 1 :])) if steps > WARM_UP else float("nan"),
        "memory": max(rank["memory"] for rank in seen) / 1024,
    }


def off_by(folder: Path) -> float:
    """‖g − r‖ / ‖r‖ of the gradients that a contender left, against those of the whole batch in fp64."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    rows = {name: torch.from_numpy(array[:BATCH]) for name, array in np.load(folder / "rows.npz").items()}
    logits = model(input_ids=rows["input_ids"]).logits[:, :-1].flatten(0, 1)
    F.cross_entropy(logits, rows["labels"][:, 1:].flatten(), ignore_index=-100).backward()
    left = np.load(folder / "gradients.npz")
    numbers = range(len(left) // 2)
    named = {left[f"weight{n}"].tobytes(): left[f"gradient{n}"] for n in numbers}
    error = size = 0.0
    for parameter in model.parameters():
        wanted = parameter.grad.numpy()
        parameter_name = named.pop(parameter.detach().float().numpy().tobytes())
        error += float(np.square(parameter_name - wanted).sum())
        size += float(np.square(wanted).sum())
    assert not named, "gradients of weights that the model does not have"
    assert size > 0
    return (error / size) ** 0.5


def lines_of(file: str) -> int:
    """Lines of code: without blank ones, comments and docstrings."""
    source = (HERE / "contenders" / file).read_text()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def measure(processes: int, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """All contenders on so many processes."""
    result: dict[str, dict[str, Any]] = {name: {"runs": []} for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, steps=WARM_UP, gradients=True)
        for contender in CONTENDERS:
            train(contender, processes, folder, WARM_UP, gradients=True)
            result[contender]["error"] = off_by(folder)
            (folder / "gradients.npz").unlink()
            print(f"  {contender}: gradients are off by {result[contender]['error']:.1e}", flush=True)
        prepare(folder, steps, gradients=False)
        order = list(CONTENDERS)
        for number in range(rounds):
            for contender in order[number % len(order) :] + order[: number % len(order)]:
                result[contender]["runs"].append(train(contender, processes, folder, steps, gradients=False))
            print(f"  round {number + 1} of {rounds}", flush=True)
    return result


def table(measured: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """The lines of the page."""
    head = ("", "processes", "step ÷ bare loop", "first step, s", "peak of a process, MB", "gradients off by", "lines")
    lines = ["".join(f"| {title} " for title in head) + "|", "|---" * len(head) + "|"]
    for processes, results in measured.items():
        bare = [run["step"] for run in results["bare loop"]["runs"]]
        for name, seen in results.items():
            ratios = [run["step"] / base for run, base in zip(seen["runs"], bare, strict=True)]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            first, memory = (
                statistics.median(run[quantity] for run in seen["runs"]) for quantity in ("first", "memory")
            )
            step = f"1 ({1e3 * statistics.median(bare):.0f} ms)" if name == "bare loop" else ratio
            lines.append(
                f"| {name} | {processes} | {step} | {first:.1f} | {memory:.0f} | {seen['error']:.0e} | "
                f"{lines_of(CONTENDERS[name])} |"
            )
    return lines


def versions() -> str:
    """Of the contenders."""
    from importlib.metadata import version

    names = ("torch", "transformers", "accelerate", "lightning-fabric")
    return ", ".join(f"{name} {version(name)}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    arguments = parser.parse_args()
    measured = {}
    for processes in arguments.processes:
        print(f"{processes} process{'es' if processes > 1 else ''}", flush=True)
        measured[processes] = measure(processes, arguments.rounds, arguments.steps)
    about = f"{arguments.rounds} rounds of {arguments.steps} updates; {versions()}; {platform.machine()}, "
    text = "\n".join([*table(measured), "", f"{about}{os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}."])
    print(f"\n{text}")
    if arguments.write:
        page.put("peers", text)


if __name__ == "__main__":
    main()
