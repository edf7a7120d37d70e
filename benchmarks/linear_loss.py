"""Summed cross-entropy from hidden states: exactness and time of ours beside torch's ways, in one run.

    python -m benchmarks.linear_loss [--tokens 2048] [--repeats 7]

Contenders: plain (all logits at once), torch's `linear_cross_entropy` in chunks, plain by checkpointed chunks, ours.
Errors are ‖a − b‖ / ‖b‖ against the plain way in float64 from the same numbers; times are medians, as ratios to the
plain way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unisono.engines.torch.losses.linear_cross_entropy import IGNORED, linear_cross_entropy

CHUNK = 512


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")


def chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.stack([checkpoint(plain, h, weight, t, use_reentrant=False) for h, t in parts]).sum()


def torchs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, None, targets, CHUNK)[0]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "checkpointed chunks": chunks,
    "ours": ours,
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    CONTENDERS["torch's chunks"] = torchs


def gradients(way: Callable[[Tensor, Tensor, Tensor], Tensor], *numbers: Tensor) -> tuple[Tensor, ...]:
    """Loss and both gradients; the scale is what a count of targets would be."""
    loss = way(*numbers)
    return (loss.detach(), *torch.autograd.grad(loss * 1e-3, numbers[:2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print("| width × vocabulary | dtype | way | error of loss | hidden's gradient | weight's gradient | time / plain |")
    print("|---|---|---|---|---|---|---|")
    for width, vocabulary in ((256, 8192), (512, 32000)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            hidden = torch.randn(arguments.tokens, width, dtype=dtype, requires_grad=True)
            weight = (0.05 * torch.randn(vocabulary, width, dtype=dtype)).requires_grad_()
            targets = torch.randint(0, vocabulary, (arguments.tokens,))
            targets[::7] = IGNORED
            numbers = (hidden, weight, targets)
            exact = gradients(
                plain, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets
            )
            times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for _ in range(arguments.repeats):
                for name, way in CONTENDERS.items():
                    began = time.perf_counter()
                    gradients(way, *numbers)
                    times[name].append(time.perf_counter() - began)
            base = statistics.median(times["plain"][1:])
            for name, way in CONTENDERS.items():
                pairs = zip(gradients(way, *numbers), exact, strict=True)
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
                row = [
                    f"{width} × {vocabulary}",
                    str(dtype).removeprefix("torch."),
                    name,
                    *(f"{e:.1e}" for e in errors),
                ]
                print("|", " | ".join([*row, f"{statistics.median(times[name][1:]) / base:.2f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
