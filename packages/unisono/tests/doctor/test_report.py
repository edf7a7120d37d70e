"""`unisono doctor`: facts of this host, rates that are measured, and what follows from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.unisono.tests.doctor.test_rules import HEALTHY
from packages.unisono.tests.launch import jobs
from unisono.doctor import facts, rates, report
from unisono.doctor.rates import Rate
from unisono.doctor.report import DoctorReport
from unisono.doctor.rules import HostFinding


def test_the_facts_are_those_of_this_host(tmp_path: Path):
    found = facts.gather_facts(tmp_path / "runs")
    assert found.versions["torch"] == torch.__version__
    assert found.cores >= 1
    assert any("127.0.0.1" in interface.addresses for interface in found.interfaces)
    assert found.disk_gib is not None
    assert found.disk_gib > 0
    assert found.writable == ""
    assert found.accelerator == ("cpu" if not found.devices else found.accelerator)
    assert not (tmp_path / "runs").exists()


def test_libraries_that_do_not_fit_together_are_no_reason_to_say_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses() -> None:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
    found = facts.gather_facts(tmp_path).versions
    assert found["cuda"] == "13.0" and "cudnn" not in found


def test_a_directory_that_cannot_be_written_to_is_a_fact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuses(dir: Path) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(facts.tempfile, "TemporaryFile", refuses)
    assert facts.gather_facts(tmp_path).writable == "Read-only file system"


# rates --------------------------------------------------------------------------------------------------------------


def test_a_rate_of_products_counts_two_operations_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rates, "_time_repeated", lambda act, device: (act(), 0.5)[1])
    found = rates.measure_matmul("fp32", torch.float32, torch.device("cpu"))
    assert (found.name, found.unit) == ("matmul fp32", "TFLOP/s")
    assert found.value == pytest.approx(2 * 1024**3 / 0.5 / 1e12)
    assert rates.measure_memory_copy(torch.device("cpu")).value == pytest.approx(2 * 2**26 / 0.5 / 1e9)


def test_a_type_that_a_device_does_not_have_is_an_abstention():
    found = rates.measure_matmul("int", torch.int8, torch.device("meta:0"))
    wrong = rates.measure_matmul("bits", torch.bits8, torch.device("cpu"))
    assert found.value is None or found.value > 0
    assert wrong.value is None
    assert str(wrong).startswith("matmul bits: ABSTAIN, ")


def test_a_directory_that_was_not_there_is_not_left_behind(tmp_path: Path):
    found = rates.measure_disk(tmp_path / "runs")
    assert found.value is not None
    assert found.value > 0
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_cannot_be_made_is_an_abstention(tmp_path: Path):
    (tmp_path / "file").touch()
    assert str(rates.measure_disk(tmp_path / "file" / "runs")).endswith("Not a directory")


def test_one_process_has_nothing_to_add_up():
    assert (
        str(rates.measure_all_reduce(1, "cpu"))
        == "all-reduce 1 × cpu: ABSTAIN, there is one device, so a run is one process"
    )


@pytest.mark.slow
def test_two_processes_add_up(monkeypatch: pytest.MonkeyPatch):
    found = rates.measure_all_reduce(2, "cpu")
    assert found.value is not None, found.why
    assert 0 < found.value < 1000


@pytest.mark.slow
def test_processes_that_cannot_start_are_an_abstention(monkeypatch: pytest.MonkeyPatch):
    found = rates.measure_all_reduce(2, "no-such-device")
    assert found.value is None
    assert "no-such-device" in found.why


# the report ---------------------------------------------------------------------------------------------------------


def made(*findings: HostFinding, measured: tuple[Rate, ...] = ()) -> DoctorReport:
    return DoctorReport(HEALTHY, measured, findings, ["train.precision=bf16"])


def test_a_failure_alone_is_an_exit_code_of_1():
    assert made().exit_code == 0
    assert made(HostFinding("WARNING", "a", "b"), HostFinding("ABSTAIN", "a", "b")).exit_code == 0
    assert made(HostFinding("WARNING", "a", "b"), HostFinding("FAIL", "a", "b")).exit_code == 1


def test_the_report_says_what_is_wrong_and_what_to_do_and_counts():
    measured = (Rate("matmul fp32", 12.345, "TFLOP/s"), Rate("matmul fp64", None, "TFLOP/s", "no such kernel"))
    told = made(HostFinding("FAIL", "disk full", "0.50 GiB are free", "free some"), measured=measured).lines()
    assert "accelerators  2 × NVIDIA H200" in told
    assert "rates         matmul fp32: 12.3 TFLOP/s" in told
    assert "              matmul fp64: ABSTAIN, no such kernel" in told
    assert told[-4:] == [
        "FAIL    0.50 GiB are free", "        free some", "advice  train.precision=bf16", "1 FAIL, 1 ABSTAIN",
    ]  # fmt: skip
    assert made().lines()[-1] == "no known problems found"


def test_the_environment_is_not_told():
    secret = replace(HEALTHY, environment={"WANDB_API_KEY": "canary"})
    found = DoctorReport(secret, [], [], [])
    assert "canary" not in json.dumps(found.to_json()) + "".join(found.lines())


def test_a_device_far_below_its_data_sheet_is_a_warning():
    (finding,) = report.find_slow_devices(
        HEALTHY, [Rate("matmul bf16", 100.0, "TFLOP/s"), Rate("matmul fp32", 45.0, "TFLOP/s")]
    )
    assert (finding.level, finding.rule) == ("WARNING", "slow device")
    assert finding.what == "matmul bf16: 100 TFLOP/s, 10% of the data sheet's rate"
    assert report.find_slow_devices(HEALTHY, [Rate("matmul bf16", 600.0, "TFLOP/s")]) == []
    assert report.find_slow_devices(replace(HEALTHY, devices=()), [Rate("matmul bf16", 0.1, "TFLOP/s")]) == []


@pytest.mark.parametrize(
    ("low", "told"),
    [
        (600.0, "train.precision=bf16: matmuls are 12.0 times as fast as in fp32"),
        (10.0, "train.precision=fp32: bf16 matmuls are 5.0 times slower on this device"),
    ],
)
def test_the_precision_that_is_faster_here_is_advised(low: float, told: str):
    measured = [Rate("matmul bf16", low, "TFLOP/s"), Rate("matmul fp32", 50.0, "TFLOP/s")]
    assert told in report.advice(HEALTHY, measured)
    assert not any("precision" in line for line in report.advice(HEALTHY, []))


# the command --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_fails_on_the_famous_mistake(tmp_path: Path):
    done = jobs.unisono("doctor", "--no-rates", cwd=tmp_path, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb=128")
    assert done.returncode == 1, done.stderr
    told = done.stdout.splitlines()
    at = next(i for i, line in enumerate(told) if line.startswith("FAIL"))
    assert told[at].startswith("FAIL    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb=128: torch cannot parse it")
    assert told[at + 1].strip().endswith("as in max_split_size_mb:128")


@pytest.mark.slow
def test_the_command_measures_and_tells_it_as_json(tmp_path: Path):
    done = jobs.unisono("doctor", "--json", "--dir", str(tmp_path / "runs"), cwd=tmp_path, SOME_TOKEN="canary")
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"]
    assert "canary" not in done.stdout
    named = {rate["name"]: rate["value"] for rate in told["rates"]}
    measured = {"matmul fp32", "matmul bf16", "matmul fp64", "memory copy", "disk write"}
    assert measured <= named.keys()
    assert all(named[name] > 0 for name in measured)
    if not told["facts"]["devices"]:
        assert named["all-reduce 2 × cpu"] > 0
