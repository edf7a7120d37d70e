"""Devices and links that a plan may be for, and how fast they are.

Peaks are the vendors'; what of them a step reaches is in `cost`. Rates of arithmetic are those by which runs report
MFU, `unisono.observe.peak_rates`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from unisono.observe.peak_rates import peak_flops
from unisono.runtime.errors import ConfigError, nearest


@dataclass(frozen=True)
class Device:
    """A kind of device, as its vendor describes it.

    Attributes:
        product: Its name, by which its peak rates are found.
        memory: Bytes.
        bandwidth: Of its memory, bytes a second.
        node: Devices in a node.
        intra: Bytes a second that it sends to others of its node, in one direction.
        inter: Bytes a second that it sends to other nodes: its share of the node's network adapters.
        source: Where these figures stand.
        slower: Share of the peak rate of arithmetic that its power limit leaves, where a publication names one.
    """

    product: str
    memory: float
    bandwidth: float
    node: int
    intra: float
    inter: float
    source: str
    slower: float = 1.0


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
DEVICES = {
    "a100": Device(
        "NVIDIA A100-SXM4-80GB", 80e9, 2.039e12, 8, 300e9, 25e9, f"{_NVIDIA}/a100; DGX A100: 8 × 200 Gb/s"
    ),
    "h100": Device(
        "NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 8, 450e9, 50e9, f"{_NVIDIA}/h100 (SXM); DGX H100: 8 × 400 Gb/s"
    ),
    "h100-500w": Device(
        "NVIDIA H100 96GB HBM2e", 96e9, 2.4e12, 8, 450e9, 50e9,
        "torchtitan, benchmarks/llama3_h100_202412 (HBM2e, 500 W); slower: from its eager figure on 8 GPUs", 0.785,
    ),
    "h200": Device("NVIDIA H200", 141e9, 4.8e12, 8, 450e9, 50e9, f"{_NVIDIA}/h200 (SXM); 8 × 400 Gb/s"),
    "b200": Device("NVIDIA B200", 180e9, 8e12, 8, 900e9, 50e9, f"{_NVIDIA}/dgx-b200 (system / 8)"),
    "mi300x": Device(
        "AMD Instinct MI300X", 192e9, 5.3e12, 8, 448e9, 50e9,
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (7 links of 64 GB/s)",
    ),
    "l40s": Device("NVIDIA L40S", 48e9, 0.864e12, 8, 32e9, 12.5e9, f"{_NVIDIA}/l40s (PCIe 4.0 × 16); 100 Gb/s"),
}  # fmt: skip
MOST = 4096  # devices


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind, in nodes.

    Attributes:
        device: The kind.
        count: Devices in all.
        node: Devices of a node.
        memory: Bytes of each that a run may use.
        inter: Bytes a second between nodes, per device.
    """

    device: Device
    count: int
    node: int
    memory: float
    inter: float

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.count // self.node)

    def peak(self, precision: str) -> float | None:
        """FLOP/s of one device; None where no rate is known."""
        peak = peak_flops(self.device.product, precision)
        return peak and peak * self.device.slower

    def is_local(self, ranks: tuple[int, ...]) -> bool:
        """Whether all members of a group are in one node."""
        return _count_beside_first(ranks, self.node) == len(ranks)

    def rate(self, ranks: tuple[int, ...]) -> float:
        """Bytes a second at which a ring through a group moves its message.

        Within a node every member sends over its own links. Between nodes a ring for each member of a node crosses, so
        the members of a node share the message among their network adapters.
        """
        together = _count_beside_first(ranks, self.node)
        if together == len(ranks):
            return self.device.intra
        return min(self.inter * together, self.device.intra if together > 1 else float("inf"))


@lru_cache(maxsize=64)  # the same few groups of up to 4,096 ranks make every collective of every layout
def _count_beside_first(ranks: tuple[int, ...], node: int) -> int:
    """Members of a group that are in the node of its first."""
    return sum(rank // node == ranks[0] // node for rank in ranks)


def parse_hardware(text: str, memory_gb: float | None = None, inter_gbps: float | None = None) -> Hardware:
    """The hardware that a word such as `h100x64` names, or `h100x64/4` with four devices a node.

    Raises:
        ConfigError: For a word of another form, an unknown device, or numbers that do not fit.

    >>> parse_hardware("h100x64").nodes, parse_hardware("a100x8/4").nodes
    (8, 2)
    """
    found = re.fullmatch(r"([a-z0-9-]+?)(?:x(\d+))?(?:/(\d+))?", text.strip().lower())
    if found is None:
        raise ConfigError(f"hardware={text}: write DEVICExCOUNT, e.g. h100x64, or h100x64/4 for 4 devices in a node")
    name, count, node = found[1], int(found[2] or 1), found[3]
    if name not in DEVICES:
        raise ConfigError(f"hardware={text}: no such device, {nearest(name, DEVICES)}; known: {', '.join(DEVICES)}")
    if not 1 <= count <= MOST:
        raise ConfigError(f"hardware={text}: from 1 to {MOST:,} devices can be planned, not {count:,}")
    device = DEVICES[name]
    each = min(int(node or device.node), count)
    if each < 1 or count % each:
        raise ConfigError(
            f"hardware={text}: {count} devices cannot be divided into nodes of {each}; give the devices of a node as "
            f"{name}x{count}/N"
        )
    return Hardware(
        device,
        count,
        each,
        device.memory if memory_gb is None else memory_gb * 1e9,
        device.inter if inter_gbps is None else inter_gbps * 1e9 / 8,
    )
