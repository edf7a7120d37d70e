"""The product of experts: transformers' loop against torch's grouped product, forward and backward.

`python -m benchmarks.experts [--device cuda] [--repeats 20]` prints a table: milliseconds of one layer's pass, the
least and the middle of the repeats, taken in turns so that both see the same machine, and how far the gradients of the
two are from each other. An A/A row, the loop against itself, shows what the machine alone makes of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono_language import experts


@dataclass(frozen=True)
class Size:
    """Of a layer and what it is given."""

    name: str
    hidden: int
    inner: int
    experts: int
    best: int
    tokens: int


SIZES = (
    Size("moe_tiny", 192, 128, 8, 2, 4096),
    Size("OLMoE 1B-7B", 2048, 1024, 64, 8, 4096),
    Size("Qwen3 30B-A3B", 2048, 768, 128, 8, 4096),
)


def layer(size: Size, dtype: torch.dtype, device: str) -> nn.Module:
    """The experts of one layer, as transformers builds them."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=size.hidden, moe_intermediate_size=size.inner, num_experts=size.experts)
    module: nn.Module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module.to(device, dtype)


def inputs(size: Size, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and experts that some of them prefer, as untrained routers do."""
    hidden = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype, requires_grad=True)
    scores = torch.randn(size.tokens, size.experts, device=device) + torch.randn(size.experts, device=device)
    shares, chosen = scores.softmax(-1).topk(size.best, dim=-1)
    return hidden, chosen, shares.to(dtype)


def once(module: nn.Module, how: str, inputs: tuple[Tensor, Tensor, Tensor], device: str) -> float:
    """Milliseconds of a forward and a backward pass."""
    module.zero_grad()
    module.config._experts_implementation = {"loop": "eager", "grouped": experts.GROUPED}[how]
    _wait(device)
    began = time.perf_counter()
    result = module(*inputs)
    result.backward(torch.ones_like(result))
    _wait(device)
    return 1e3 * (time.perf_counter() - began)


def gradients(module: nn.Module) -> Tensor:
    """All of them in one vector, fp32."""
    return torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sizes", nargs="*", default=[size.name for size in SIZES])
    arguments = parser.parse_args()
    experts.register_grouped()
    torch.manual_seed(0)
    print("| layer | precision | loop, ms | loop again | grouped, ms | loop / grouped | gradients differ by |")
    print("|---|---|---|---|---|---|---|")
    for size in (size for size in SIZES if size.name in arguments.sizes):
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            module, batch = layer(size, dtype, arguments.device), inputs(size, dtype, arguments.device)
            vectors = {}
            for how in ("loop", "grouped"):  # the first pass of each is not timed
                once(module, how, batch, arguments.device)
                vectors[how] = gradients(module)
            differ = float((vectors["grouped"] - vectors["loop"]).norm() / vectors["loop"].norm())
            turns = [
                [once(module, how, batch, arguments.device) for how in ("loop", "loop", "grouped")]
                for _ in range(arguments.repeats)
            ]
            cells = [f"{min(times):.1f} / {statistics.median(times):.1f}" for times in zip(*turns, strict=True)]
            ratio = statistics.median(turn[0] / turn[2] for turn in turns)
            print(f"| {size.name} | {name} | {' | '.join(cells)} | {ratio:.2f} | {differ:.0e} |", flush=True)


if __name__ == "__main__":
    main()
