"""Sizes of the models, for both engines, and their FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono_puzzles.data.formats import Format
from unisono_puzzles.settings import Model

EPS = 1e-5  # of RMSNorm
ROPE_BASE = 10_000.0
CUT_STD = 0.87962566103423978  # of a standard normal cut off at ±2


@dataclass(frozen=True)
class Kind:
    """What the model needs to know about one kind of puzzle.

    Attributes:
        format: its tokens.
        embeddings: number of puzzle identifiers.
    """

    format: Format
    embeddings: int = 1


Kinds = Mapping[str, Kind]


def inner_width(features: int, config: Model) -> int:
    """The inner width of a SwiGLU over so many features: 2/3 of the expansion, rounded up."""
    wanted, multiple = round(config.expansion * features * 2 / 3), config.inner_multiple
    return -(-wanted // multiple) * multiple


def places(kind: Kind, config: Model) -> int:
    """Positions of the network: the prefix and the cells."""
    return config.prefix + kind.format.length


def neighbours_of_cell(format_: Format) -> int:
    """Scores that sparse attention computes for a cell, besides those of the prefix."""
    return format_.width + format_.height + format_.box[0] * format_.box[1]


def net_flops(kind: Kind, config: Model) -> float:
    """FLOPs of one forward pass of the network over one puzzle; a multiplication and an addition are two."""
    length, width = places(kind, config), config.width
    swiglu = 6.0 * length * width * inner_width(width, config)
    if config.mixer == "mlp":
        return config.layers * (swiglu + 6.0 * width * length * inner_width(length, config))
    projections = 8.0 * length * width**2
    pairs = float(length * length)
    if config.mixer == "sparse":
        pairs = kind.format.length * (config.prefix + neighbours_of_cell(kind.format)) + config.prefix * float(length)
    return config.layers * (swiglu + projections + 4.0 * pairs * width)


def step_flops(kind: Kind, config: Model, h_cycles: int, l_cycles: int) -> float:
    """FLOPs of one supervision step of one puzzle, forward and backward; recomputation is not counted."""
    calls = h_cycles * (l_cycles + 1)
    backward = {"cycle": l_cycles + 1, "step": 2, "all": calls}[config.gradient]
    head = 2.0 * kind.format.length * config.width * kind.format.vocabulary
    return net_flops(kind, config) * (calls + 2 * backward) + 3 * head
