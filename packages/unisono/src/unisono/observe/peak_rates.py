"""Dense peak rates of devices, for MFU. An unknown device gives no MFU rather than a wrong one.

Rates are TFLOP/s without sparsity, with fp32 accumulation, of one device as torch sees it. `bf16` is the rate of the
matrix unit; `fp32` is the rate of plain fp32 arithmetic, since `fp32` runs do not enable TF32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Peak:
    """Peak rates of one device.

    Attributes:
        match: Words that must all occur in the device's lower-case name.
        bf16: TFLOP/s, or None if the device has no bf16 matrix unit.
        fp32: TFLOP/s.
        source: The vendor's document.
    """

    match: tuple[str, ...]
    bf16: float | None
    fp32: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"

# Words that mean less than the whole device: a slice of it, or a smaller chip sold under the same name.
_PARTIAL_DEVICE_WORDS = {"mig", "laptop", "mobile", "d"}

# The first match counts, so more specific names come first.
PEAKS = (
    Peak(("gb200",), 2500.0, 80.0, f"{_NVIDIA}/gb200-nvl72 (rack / 72)"),
    Peak(("b300",), 2250.0, 75.0, f"{_NVIDIA}/dgx-b300 (system / 8)"),
    Peak(("b200",), 2250.0, 75.0, f"{_NVIDIA}/dgx-b200 (system / 8)"),
    Peak(("h200", "nvl"), 835.5, 60.0, f"{_NVIDIA}/h200 (NVL, dense = half of the sparse figure)"),
    Peak(("gh200",), 989.4, 67.0, f"{_NVIDIA}/grace-hopper-superchip"),
    Peak(("h200",), 989.4, 67.0, f"{_NVIDIA}/h200 (SXM)"),
    Peak(("h100", "pcie"), 756.0, 51.2, "NVIDIA H100 Tensor Core GPU architecture white paper, table 2"),
    Peak(("h100", "nvl"), 835.5, 60.0, f"{_NVIDIA}/h100 (NVL, dense = half of the sparse figure)"),
    Peak(("h100",), 989.4, 66.9, "NVIDIA H100 Tensor Core GPU architecture white paper, table 2 (SXM5)"),
    Peak(("h800", "pcie"), 756.0, 51.2, "as H100 PCIe"),
    Peak(("h800",), 989.4, 66.9, "as H100 SXM5"),
    Peak(("h20",), 148.0, 44.0, "NVIDIA H20 data sheet"),
    Peak(("a100",), 312.0, 19.5, f"{_NVIDIA}/a100"),
    Peak(("a800",), 312.0, 19.5, "as A100"),
    Peak(("a40",), 149.7, 37.4, f"{_NVIDIA}/a40"),
    Peak(("a30",), 165.0, 10.3, f"{_NVIDIA}/products/a30-gpu"),
    Peak(
        ("a10g",),
        70.0,
        35.0,
        "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    ),
    Peak(("a10",), 125.0, 31.2, f"{_NVIDIA}/products/a10-gpu"),
    Peak(("l40s",), 362.05, 91.6, f"{_NVIDIA}/l40s"),
    Peak(("l40",), 181.05, 90.5, f"{_NVIDIA}/l40"),
    Peak(("l4",), 121.0, 30.3, f"{_NVIDIA}/l4 (dense = half of the sparse figure)"),
    Peak(("rtx", "5090"), 209.5, 104.8, "NVIDIA RTX Blackwell GPU architecture white paper, appendix A"),
    Peak(("rtx", "4090"), 165.2, 82.6, "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation)"),
    Peak(("rtx", "3090", "ti"), 80.0, 40.0, "NVIDIA Ampere GA102 white paper (fp32 accumulation)"),
    Peak(("rtx", "3090"), 71.0, 35.6, "NVIDIA Ampere GA102 GPU architecture white paper, table 3 (fp32 accumulation)"),
    Peak(("v100", "sxm2"), None, 15.7, "NVIDIA Tesla V100 GPU architecture white paper (SXM2; fp16 only)"),
    Peak(("tesla", "t4"), None, 8.1, f"{_NVIDIA}/tesla-t4 (fp16 only)"),
    Peak(("mi355x",), 2516.6, 157.3, f"{_AMD}/mi350/mi355x.html"),
    Peak(("mi350x",), 2306.9, 144.2, f"{_AMD}/mi350/mi350x.html"),
    Peak(("mi325x",), 1307.4, 163.4, f"{_AMD}/mi300/mi325x.html"),
    Peak(("mi300x",), 1307.4, 163.4, f"{_AMD}/mi300/mi300x.html"),
    Peak(("mi300a",), 980.6, 122.6, f"{_AMD}/mi300/mi300a.html"),
    Peak(("mi250x",), 191.5, 23.9, f"{_AMD}/mi200/mi250x.html (one of its two dies, as torch sees it)"),
    Peak(("mi210",), 181.0, 22.6, f"{_AMD}/mi200/mi210.html"),
)


@cache
def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak rate of one device in FLOP/s, or None if unknown.

    Args:
        device: The vendor's name for it.
        precision: `bf16`, `fp32` or `fp64`; there are no rates for fp64.
    """
    words = device.lower().replace("-", " ").split()
    if _PARTIAL_DEVICE_WORDS.intersection(words):
        return None
    for peak in PEAKS:
        if all(
            any(word == part or (word.startswith(part) and not word[len(part)].isalnum()) for word in words)
            for part in peak.match
        ):
            rate = {"bf16": peak.bf16, "fp32": peak.fp32}.get(precision)
            return rate * 1e12 if rate else None
    return None
