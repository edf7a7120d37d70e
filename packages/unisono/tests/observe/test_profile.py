"""Where a step's time goes: every instant belongs to one part, and to the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import TransformerTask
from unisono.config.schema.run import Observe
from unisono.engines.torch.profiler import TorchProfiler
from unisono.observe import events
from unisono.observe.profile import PARTS, breakdown, format_table, read_trace
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

OWN, GPU_OWN = "user_annotation", "gpu_user_annotation"


def event(category: str, name: str, begin: float, end: float, tid: int = 1) -> dict[str, Any]:
    """Milliseconds in; a trace has microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3, "tid": tid}


def step(begin: float, end: float) -> dict[str, Any]:
    return event(OWN, "unisono/step", begin, end)


def spent(*trace: dict[str, Any]) -> dict[str, float]:
    """The parts that took time; that they add up is asserted."""
    found = breakdown(trace)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["step"], rel=1e-9)
    return {part: pytest.approx(value) for part, value in found.items() if value > 1e-9}


CPU = (
    step(0, 100), event(OWN, "unisono/data", 0, 10), event(OWN, "unisono/transfer", 10, 15),
    event(OWN, "unisono/forward", 20, 40), event(OWN, "unisono/backward", 40, 80),
    event(OWN, "unisono/reduction", 80, 84), event(OWN, "unisono/optimizer", 84, 99),
)  # fmt: skip


def test_parts_are_what_they_took_and_what_is_between_them_is_other() -> None:
    assert spent(*CPU) == {
        "data": 10, "transfer": 5, "forward": 20, "backward": 40, "reduction": 4, "optimizer": 15,
        "other": 6, "step": 100,
    }  # fmt: skip


def test_the_innermost_part_counts() -> None:
    assert spent(*CPU, event(OWN, "unisono/data", 30, 35))["forward"] == 15


def test_a_collective_beside_an_operation_of_the_model_costs_nothing() -> None:
    hidden = event(OWN, "gloo:all_reduce", 50, 70, tid=2), event("cpu_op", "aten::mm", 45, 75)
    assert spent(*CPU, *hidden)["backward"] == 40


def test_a_collective_that_the_backward_pass_waits_for_is_reduction() -> None:
    shown = event(OWN, "gloo:all_reduce", 50, 80, tid=2), event("cpu_op", "aten::mm", 45, 60)
    assert (spent(*CPU, *shown)["backward"], spent(*CPU, *shown)["reduction"]) == (20, 24)


def test_overlapping_collectives_are_counted_once() -> None:
    two = [event(OWN, "gloo:all_reduce", 50, 80, tid=tid) for tid in (2, 3)]
    assert spent(*CPU, *two)["reduction"] == 34


def test_steps_are_averaged_and_what_is_between_them_is_left_out() -> None:
    assert spent(step(0, 10), event(OWN, "unisono/data", 0, 4), event(OWN, "unisono/data", 12, 14), step(20, 50)) == {
        "data": 2, "other": 18, "step": 20,
    }  # fmt: skip


def test_on_an_accelerator_the_part_is_that_whose_kernels_run_however_early_they_were_launched() -> None:
    launched = (step(0, 100), event(OWN, "unisono/forward", 0, 5), event(OWN, "unisono/backward", 5, 10))
    waited = (event(OWN, "unisono/reduction", 10, 95), event(OWN, "unisono/optimizer", 95, 100))
    device = (
        event(GPU_OWN, "unisono/forward", 2, 32, tid=7), event("kernel", "gemm", 2, 30, tid=7),
        event(GPU_OWN, "unisono/backward", 32, 90, tid=7), event("kernel", "gemm", 32, 70, tid=7),
        event("kernel", "ncclDevKernel_AllReduce", 60, 85, tid=9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 35, tid=8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 86, 88, tid=8),
    )  # fmt: skip
    assert spent(*launched, *waited, *device) == {
        "forward": 2 + 28,  # at first the device waits for the process, which is in its forward pass
        "transfer": 2 + 2,  # what no kernel hides
        "backward": 38,
        "reduction": 15 + 1 + 7,  # exposed, and where the device is idle and the process waits
        "optimizer": 5,
        "step": 100,
    }


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        breakdown([event(OWN, "unisono/data", 0, 1)])


def test_the_table_shows_every_part_of_every_rank() -> None:
    ranks = [{**dict.fromkeys(PARTS, 1.0), "step": 7.0}, {**dict.fromkeys(PARTS, 2.0), "step": 14.0}]
    lines = format_table(ranks, (3, 5))
    assert lines[0] == "where the time goes, ms per step (steps 3 to 5)"
    assert [line.split()[0] for line in lines[2:]] == [*PARTS, "step"]
    assert lines[2].split() == ["data", "1.00", "14", "%", "2.00", "14", "%"]


@pytest.mark.parametrize("steps", [[3, 2], [0, 2], [1]])
def test_steps_that_are_none_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValueError, match="profile"):
        Observe.model_validate({"profile": steps})


# real runs ------------------------------------------------------------------------------------------------------------


def run(folder: Path, place: ProcessInfo | None = None, group: Communicator | None = None, **observe: Any) -> Path:
    place = place or ProcessInfo()
    config = configuration(
        layout={"world_size": place.world_size, "micro_batch": 3, "strategy": "ddp" if group else "single"},
        train={"steps": 5},
        observe={"progress": False, **observe},
        eval={"every": 3},
    )
    runs.train(folder, config, TransformerTask(TransformerTask.Config(dropout=0.2)), place, group)
    return folder


def on_two(place: ProcessInfo, group: Communicator, folder: Path) -> None:
    run(folder, place, group, profile=(2, 4))


def test_a_profile_changes_no_bit_of_a_run_and_adds_up(tmp_path: Path) -> None:
    without, profiled = run(tmp_path / "without"), run(tmp_path / "profiled", profile=(2, 4))
    told = [
        [(line["step"], line["loss"], line.get("grad_norm")) for line in events.read_events(folder / "events.jsonl")]
        for folder in (without, profiled)
    ]
    assert told[0] == told[1]
    assert len({loss for _, loss, _ in told[0]}) > 5
    assert not (without / "profile").exists()
    described = json.loads((profiled / "profile" / "table.json").read_text())
    (parts,) = described["ranks"]
    assert described["steps"] == [2, 4]
    assert sum(parts[part] for part in PARTS) == pytest.approx(parts["step"], rel=1e-6)
    assert all(parts[part] > 0 for part in ("data", "transfer", "forward", "backward", "reduction", "optimizer"))
    timed = [line["seconds"] for line in events.read_events(profiled / "events.jsonl") if line["step"] in (2, 3, 4)][:2]
    assert parts["step"] == pytest.approx(1e3 * sum(timed) / len(timed), rel=2.0)
    names = [e["name"] for e in read_trace(profiled / "profile" / "rank-00000.trace.json.gz") if e.get("cat") == OWN]
    assert names.count("unisono/step") == 3
    assert names.count("unisono/forward") == names.count("unisono/backward") == 3 * 4
    assert "unisono/eval" not in names


@pytest.mark.slow
def test_every_rank_has_a_trace_and_a_column(tmp_path: Path) -> None:
    processes.run(on_two, 2, tmp_path)
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-00000.trace.json.gz", "rank-00001.trace.json.gz", "table.json", "table.txt",
    ]  # fmt: skip
    ranks = json.loads((folder / "table.json").read_text())["ranks"]
    assert len(ranks) == 2
    assert all(parts["reduction"] > 0 for parts in ranks)
    assert (folder / "table.txt").read_text().splitlines()[1].split() == ["rank", "0", "rank", "1"]


def test_steps_that_are_not_left_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, profile=(8, 9), progress=True)
    assert "none of these steps is still to come" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_disk_that_is_full_is_warned_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = TorchProfiler.stop

    def full(self: TorchProfiler, path: Path | None) -> None:
        stop(self, None)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TorchProfiler, "stop", full)
    run(tmp_path, profile=(2, 3))
    assert (
        "the profile could not be written (rank 0: OSError: [Errno 28] No space left on device)"
        in capfd.readouterr().err
    )
    assert [e["step"] for e in events.read_events(tmp_path / "events.jsonl") if not e.get("eval")] == [1, 2, 3, 4, 5]


def test_without_a_profile_a_part_is_nothing() -> None:
    import torch

    profiler = TorchProfiler(torch.device("cpu"))
    assert profiler.part("forward") is profiler.part("backward")


@pytest.mark.parametrize("wrong", [True, 3, [3], [1, 2, 3]])
def test_steps_that_are_no_two_are_refused_with_what_to_give(wrong: Any) -> None:
    with pytest.raises(ValidationError, match=r"the first and the last step to record, e\.g\. observe\.profile=\[10,"):
        Observe(profile=wrong)
