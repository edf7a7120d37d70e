"""A plain port of the published training loop of TRM to one device: the same mathematics, in the published manner.

Eager PyTorch; RMSNorm, RoPE and SwiGLU spelled out; the loss in fp64 over the whole batch; examples that rows at work
ignore are made and thrown away; metrics read with `.item()` after every step; Adam-atan2 parameter by parameter, and an
average of the weights that is updated parameter by parameter. Written anew from the description of the algorithm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A projection without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class SwiGLU(nn.Module):
    """`down(silu(gate) * up)`."""

    def __init__(self, features: int, expansion: float, multiple: int) -> None:
        super().__init__()
        inner = math.ceil(round(expansion * features * 2 / 3) / multiple) * multiple
        self.gate_up, self.down = Linear(features, 2 * inner), Linear(inner, features)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Multi-head attention with RoPE."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3 * self.heads, -1).split(self.heads, dim=2)
        query, key = (part * turns[0][:, None] + _half(part) * turns[1][:, None] for part in (query, key))
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    """Mixing of cells, then a SwiGLU; a norm after each."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__()
        self.mlp = config.mixer == "mlp"
        multiple = config.inner_multiple
        self.mix: nn.Module = (
            SwiGLU(length, config.expansion, multiple) if self.mlp else Attention(config.width, config.heads)
        )
        self.swiglu = SwiGLU(config.width, config.expansion, multiple)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        if self.mlp:
            x = x.transpose(1, 2)
            x = rms_norm(x + self.mix(x)).transpose(1, 2)
        else:
            x = rms_norm(x + self.mix(x, turns))
        return rms_norm(x + self.swiglu(x))


class PlainModel(nn.Module):
    """TRM for one kind of puzzle; arguments as the recipe's models."""

    def __init__(self, config: Any, vocabulary: int, cells: int) -> None:
        super().__init__()
        self.config, width = config, config.width
        length = config.prefix + cells
        self.tokens = nn.Parameter(torch.randn(vocabulary, width) / math.sqrt(width))
        self.puzzles = nn.Parameter(torch.zeros(1, width))
        self.head, self.q_head = Linear(width, vocabulary), nn.Linear(width, 2)
        self.layers = nn.ModuleList([Layer(config, length) for _ in range(config.layers)])
        self.register_buffer("answer_start", torch.randn(width))
        self.register_buffer("latent_start", torch.randn(width))
        half = width // config.heads // 2
        rates = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(length), torch.cat([rates, rates]))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5.0)

    def net(self, x: Tensor, injected: Tensor) -> Tensor:
        x = x + injected
        for layer in self.layers:
            x = layer(x, (self.cosines, self.sines))
        return x

    def forward(self, answer: Tensor, latent: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config = self.config
        cells = F.embedding(rows["question"].int(), self.tokens)
        puzzle = F.pad(self.puzzles[rows["identifier"]], (0, (config.prefix - 1) * config.width))
        shown = math.sqrt(config.width) * torch.cat([puzzle.view(-1, config.prefix, config.width), cells], dim=1)
        with torch.no_grad():
            for _ in range(config.h_cycles - 1):
                for _ in range(config.l_cycles):
                    latent = self.net(latent, answer + shown)
                answer = self.net(answer, latent)
        for _ in range(config.l_cycles):
            latent = self.net(latent, answer + shown)
        answer = self.net(answer, latent)
        return answer.detach(), latent.detach(), self.head(answer)[:, config.prefix :], self.q_head(answer[:, 0])


class PlainLoop:
    """The training loop around it."""

    def __init__(self, model: PlainModel, lr: float, weight_decay: float, halt_steps: int, exploration: float) -> None:
        self.model, self.lr, self.decay = model, lr, weight_decay
        self.halt_steps, self.exploration = halt_steps, exploration
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
        self.average = {p: p.detach().clone() for p in model.parameters()}
        self.carry: dict[str, Tensor] = {}
        self.updates = 0

    def step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        model, rows = self.model, len(batch["question"])
        if not self.carry:
            shape = (rows, model.config.prefix + batch["question"].shape[1], model.config.width)
            self.carry = {
                "z_h": torch.empty(shape), "z_l": torch.empty(shape), "steps": torch.zeros(rows, dtype=torch.int32),
                "halted": torch.ones(rows, dtype=torch.bool), **{n: torch.empty_like(v) for n, v in batch.items()},
            }  # fmt: skip
        halted = self.carry["halted"]
        answer = torch.where(halted.view(-1, 1, 1), model.answer_start, self.carry["z_h"])
        latent = torch.where(halted.view(-1, 1, 1), model.latent_start, self.carry["z_l"])
        steps = torch.where(halted, 0, self.carry["steps"])
        data = {n: torch.where(halted.view(-1, *[1] * (v.ndim - 1)), v, self.carry[n]) for n, v in batch.items()}
        answer, latent, logits, q = model(answer, latent, data)
        labels = data["answer"].long()
        counted = labels > 0
        right = (logits.argmax(-1) == labels) | ~counted
        exact = right.all(-1)
        losses = stablemax_cross_entropy(logits, labels)
        answer_loss = (torch.where(counted, losses, 0.0).sum(-1) / counted.sum(-1).clamp_min(1)).sum()
        halt_loss = F.binary_cross_entropy_with_logits(q[:, 0], exact.to(q.dtype), reduction="sum")
        loss = answer_loss + 0.5 * halt_loss
        (loss / rows).backward()
        with torch.no_grad():
            steps = steps + 1
            now = (steps >= self.halt_steps) | (q[:, 0] > 0)
            least = (torch.rand_like(q[:, 0]) < self.exploration) * torch.randint_like(steps, 2, self.halt_steps + 1)
            now = now & (steps >= least)
            self.update()
        self.carry = {"z_h": answer, "z_l": latent, "steps": steps, "halted": now, **data}
        count = max(now.sum().item(), 1)
        return {
            "loss": loss.item() / rows, "answer": answer_loss.item() / rows, "halt": halt_loss.item() / rows,
            "exact": (now & exact).sum().item() / count, "steps": torch.where(now, steps, 0).sum().item() / count,
            "cells": (now * (right & counted).float().mean(-1)).sum().item() / count,
        }  # fmt: skip

    def update(self) -> None:
        self.updates += 1
        for parameter, (first, second) in self.moments.items():
            if parameter.grad is None:
                continue
            first.lerp_(parameter.grad, 1 - 0.9)
            second.mul_(0.95).addcmul_(parameter.grad, parameter.grad, value=1 - 0.95)
            mean = first / (1 - 0.9**self.updates)
            root = (second / (1 - 0.95**self.updates)).sqrt()
            parameter.mul_(1 - self.lr * self.decay).add_(torch.atan2(mean, root), alpha=-self.lr)
            parameter.grad = None
        for parameter, average in self.average.items():
            average.mul_(0.999).add_(parameter, alpha=1 - 0.999)


def rms_norm(x: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.to(torch.float64)
    shares = torch.where(wide < 0, 1 / (1 - wide + 1e-30), wide + 1)
    return -torch.log(shares / shares.sum(-1, keepdim=True)).gather(-1, labels[..., None])[..., 0]


def _half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([-other, one], dim=-1)
