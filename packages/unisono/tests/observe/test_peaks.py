"""The table of peak rates: a name gives the rate of the device that has it, and an unknown one gives none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.observe import peak_rates
from unisono.observe.peak_rates import PEAKS, Peak, peak_flops


@pytest.mark.parametrize(
    ("device", "bf16", "fp32"),
    [
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA B300 SXM6 AC", 2250.0, 75.0),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA GH200 480GB", 989.4, 67.0),
        ("NVIDIA H200", 989.4, 67.0),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA H800", 989.4, 66.9),
        ("NVIDIA H800 PCIe", 756.0, 51.2),
        ("NVIDIA H20", 148.0, 44.0),
        ("NVIDIA H20-3e", 148.0, 44.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
        ("NVIDIA A800-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A40", 149.7, 37.4),
        ("NVIDIA A30", 165.0, 10.3),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A10G", 70.0, 35.0),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA L40", 181.05, 90.5),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA GeForce RTX 5090", 209.5, 104.8),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71.0, 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0, 40.0),
        ("AMD Instinct MI355X", 2516.6, 157.3),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("AMD Instinct MI250X/MI250", 191.5, 23.9),
        ("AMD Instinct MI210", 181.0, 22.6),
    ],
)
def test_a_device_has_its_own_peak(device: str, bf16: float, fp32: float) -> None:
    assert (peak_flops(device, "bf16"), peak_flops(device, "fp32")) == (bf16 * 1e12, fp32 * 1e12)


@pytest.mark.parametrize(("device", "fp32"), [("Tesla V100-SXM2-16GB", 15.7e12), ("Tesla T4", 8.1e12)])
def test_a_device_without_a_bf16_unit_has_no_bf16_peak(device: str, fp32: float) -> None:
    assert (peak_flops(device, "bf16"), peak_flops(device, "fp32")) == (None, fp32)


LESS_THAN_ITS_NAME = (
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-PCIE-16GB",
)  # fmt: skip
UNKNOWN = (
    "", "NVIDIA", "NVIDIA H1000", "NVIDIA A100X", "NVIDIA RTX A4000", "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA GeForce RTX 4080", "Quadro T400", "Tesla V100S-PCIE-32GB", "AMD Instinct MI100", "AMD Radeon RX 7900 XTX",
    "Intel(R) Data Center GPU Max 1550", "Apple M3 Max",
)  # fmt: skip
CPUS = (
    "cpu", "AMD EPYC 9654 96-Core Processor", "AMD Ryzen 9 7950X 16-Core Processor", "Neoverse-V2",
    "Intel(R) Xeon(R) Platinum 8480+", "Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz",
)  # fmt: skip


@pytest.mark.parametrize("device", [*LESS_THAN_ITS_NAME, *UNKNOWN, *CPUS])
def test_a_device_that_is_not_in_the_table_has_no_peak(device: str) -> None:
    assert [peak_flops(device, precision) for precision in ("bf16", "fp32")] == [None, None]
    assert [peak_flops("NVIDIA H100 80GB HBM3", precision) for precision in ("fp64", "fp16")] == [None, None]


def entry(peak: Peak) -> str:
    return " ".join(peak.match)


@pytest.mark.parametrize("peak", PEAKS, ids=entry)
def test_an_entry_has_a_source_lower_case_words_and_a_matrix_unit_faster_than_plain_arithmetic(peak: Peak) -> None:
    assert peak.source.strip()
    assert all(word == word.lower() and word.isalnum() for word in peak.match)
    assert peak.fp32 > 0
    assert peak.bf16 is None or peak.bf16 > peak.fp32


@pytest.mark.parametrize("number", range(len(PEAKS)), ids=[entry(peak) for peak in PEAKS])
def test_no_entry_is_hidden_by_one_before_it(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    numbered = tuple(replace(peak, fp32=1.0 + place) for place, peak in enumerate(PEAKS))
    monkeypatch.setattr(peak_rates, "PEAKS", numbered)
    assert peak_flops(entry(PEAKS[number]), "fp32") == (1.0 + number) * 1e12
