"""`unisono compare`: a row for each run, seeds together with intervals, and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pyarrow import parquet

from unisono_sweeps.compare.table import (
    aggregate_seeds,
    compare_runs,
    count_parameters,
    different_keys,
    find_runs,
    name_setting,
)
from unisono_sweeps.compare.verb import CompareSettings, compare

from .written import TASK, write_fault, write_run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for lr in (0.1, 0.01):
        for seed in (0, 1, 2):
            losses = [3.0, 2.0 + lr + seed / 10, 2.5]
            write_run(tmp_path / "s" / f"lr{lr}-seed{seed}", losses, evaluations=1, optim__lr=lr, run__seed=seed)
    return tmp_path / "s"


def test_a_table_has_the_differences_and_what_each_run_reached_and_took(sweep: Path) -> None:
    runs = find_runs([sweep])[0]
    assert different_keys(runs) == ["run.seed", "optim.lr"]
    row = compare_runs(runs).to_pylist()[0]
    assert row == {
        "run": "lr0.01-seed0", "state": "finished", "run.seed": 0, "optim.lr": 0.01, "steps": 3, "loss": 2.5,
        "best_loss": 2.01, "eval/loss": 2.5, "eval/loss min": 2.01, "eval/loss max": 3.0, "eval/accuracy": 0.03,
        "eval/accuracy min": 0.01, "eval/accuracy max": 0.03, "seconds": 1.5, "flops": 3e9,
    }  # fmt: skip


def test_seeds_are_aggregated_with_the_interval_of_their_mean(sweep: Path) -> None:
    scipy = pytest.importorskip("scipy.stats")
    runs = find_runs([sweep])[0]
    row = aggregate_seeds(compare_runs(runs), different_keys(runs)).to_pylist()[0]
    values = [2.01, 2.11, 2.21]
    low, high = scipy.t.interval(0.95, 2, loc=2.11, scale=scipy.sem(values))
    assert (row["optim.lr"], row["runs"]) == (0.01, 3)
    assert row["best_loss"] == pytest.approx(2.11)
    assert row["best_loss ±"] == pytest.approx((high - low) / 2, rel=1e-3)


def test_runs_that_differ_in_their_seed_have_one_name_together(sweep: Path) -> None:
    """By which curves share a colour and a place in the legend."""
    runs = find_runs([sweep])[0]
    keys, rows = different_keys(runs), compare_runs(runs).to_pylist()
    assert {name_setting(row, keys) for row in rows} == {"lr 0.1", "lr 0.01"}
    assert name_setting(rows[0], ["optim.lr"]) == ""


def test_states_and_reasons_of_runs_that_are_not_finished_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "s" / "a", [2.0, 1.0], optim__lr=0.1)
    failed = write_run(tmp_path / "s" / "b", [2.0], total=2, optim__lr=0.2)
    write_fault(failed, "the file is gone\x1b[31m")
    compare([tmp_path / "s"], CompareSettings())
    said = capsys.readouterr().out
    assert "b: failed after step 1: rank 0: the file is gone\\x1b[31m" in said
    assert re.search(r"^a +finished", said, re.MULTILINE)


def test_a_setting_that_is_called_as_a_result_is_shown_by_its_whole_key_and_a_task_by_its_path_from_here(
    tmp_path: Path, command: Command
) -> None:
    for name, steps in (("a", 2), ("b", 3)):
        recipe = f"{Path.cwd()}/{name}.py:Mine"
        folder = write_run(tmp_path / "s" / name, [2.0] * steps)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "recipe": recipe}))
    head, first, *_ = command("compare", tmp_path / "s")[1].splitlines()
    assert head.split()[:5] == ["run", "state", "recipe", "train.steps", "steps"]
    assert first.split()[:3] == ["a", "finished", "a.py:Mine"]


def test_the_command_writes_one_table_and_pictures(sweep: Path, command: Command) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = command("compare", sweep)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["lr", "0.01", "0.1"]
    table = parquet.read_table(sweep / "comparison" / "runs.parquet")
    assert table.num_rows == 6
    pictures = {path.name: path.read_bytes()[:4] for path in (sweep / "comparison").glob("*.png")}
    assert pictures == dict.fromkeys(["curves.png", "by_lr.png", "pareto.png"], b"\x89PNG")


def test_memory_and_parameters_are_columns_and_several_keys_are_drawn_in_parallel(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    sizes = {"adamw": 12, "lion": 30, "muon": 90}
    for number, name in enumerate(sizes):
        lines = write_run(
            tmp_path / "s" / name, [2.0, 1.0 / (number + 1)], train__global_batch=number + 1, optim__kind=name
        )
        events = [json.loads(line) | {"memory_gb": number + n / 10} for n, line in enumerate(read_lines(lines))]
        (lines / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    monkeypatch.setattr("unisono_sweeps.compare.table.count_parameters", lambda folder: sizes[folder.name])
    code, out, err = command("compare", tmp_path / "s")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[-3:] == ["flops", "memory_gb", "parameters"]
    rows = parquet.read_table(tmp_path / "s/comparison/runs.parquet").to_pylist()
    assert [(row["memory_gb"], row["parameters"]) for row in rows] == [(0.1, 12), (1.1, 30), (2.1, 90)]
    assert {"parallel.png", "pareto_size.png"} <= {path.name for path in (tmp_path / "s/comparison").iterdir()}


def read_lines(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines()


def test_parameters_are_those_of_the_newest_checkpoint(tmp_path: Path, command: Command) -> None:
    words = ("train.steps=2", "train.global_batch=8", "layout.device=cpu", "run.name=a", "task.features=5")
    assert command("train", TASK, "optim=adamw", *words)[0] == 0
    assert count_parameters(Path("runs/a")) == 6
    assert count_parameters(tmp_path) is None


def test_a_fit_is_printed_and_drawn(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    for rows in (8, 16, 32, 64, 128):
        for seed in (0, 1):
            loss = 1.0 + 4 * rows**-0.5 + seed / 1000
            write_run(tmp_path / "s" / f"{rows}-{seed}", [loss], train__global_batch=rows, run__seed=seed)
    code, out, _ = command("compare", tmp_path / "s", "metric=loss", "fit=train.global_batch")
    assert code == 0
    assert re.search(r"loss over train.global_batch: (1|1\.00\d*) \+ (4|4\.0\d*|3\.99\d*) · x\^−0\.5", out)
    assert (tmp_path / "s/comparison/power_law.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metric=los"], "metric=los: the runs have no such column, did you mean 'loss'"),
        (["fit=run"], "fit=run: the runs have no such column of numbers"),
        (["fit=optim.lr"], "a power law has 3 parameters, and the runs have 2 different x"),
        (["mode=mim"], "mode: input should be 'min' or 'max'"),
        (["nowhere"], "nowhere is neither a run"),
    ],
)
def test_what_cannot_be_compared_is_refused(sweep: Path, command: Command, words: list[str], message: str) -> None:
    code, _, err = command("compare", sweep, *words)
    assert code == 2
    assert message in err


def test_a_run_of_a_sweep_that_is_damaged_is_named_and_the_others_are_compared(sweep: Path, command: Command) -> None:
    (sweep / "lr0.1-seed0" / "config.yaml").write_text("recipe: [")
    (sweep / "lr0.1-seed1" / "config.yaml").write_bytes(b"\xff\xfe")
    (sweep / "lr0.1-seed2" / "config.yaml").write_text("")
    code, _, err = command("compare", sweep)
    assert code == 0
    for seed in range(3):
        assert f"lr0.1-seed{seed} is left out: {sweep}/lr0.1-seed{seed}/config.yaml" in err
    assert parquet.read_table(sweep / "comparison" / "runs.parquet").num_rows == 3
    assert command("report", sweep)[0] == 0
    page = (sweep / "report.html").read_text()
    assert "3 of 6 runs finished" in page
    assert "lr0.1-seed0 cannot be read: " in page
    assert command("compare", sweep / "lr0.1-seed0")[0] == 2
    for folder, run in (("bad", "lr0.1-seed0"), ("good", "lr0.01-seed0")):
        (sweep.parent / folder).mkdir()
        (sweep / run).rename(sweep.parent / folder / run)
    runs, damaged = find_runs([sweep.parent / "bad", sweep.parent / "good"])
    assert ([run.folder.name for run in runs], list(damaged)) == (["lr0.01-seed0"], ["lr0.1-seed0"])


def test_what_is_not_finite_is_not_a_measurement(tmp_path: Path, command: Command) -> None:
    """A value that an evaluation does not have is none in the table: not the one before it, and not the best."""
    nan = float("nan")
    write_run(tmp_path / "s" / "a", [2.0, 1.5, nan], evaluations=1, optim__lr=0.1)
    write_run(tmp_path / "s" / "b", [nan, nan, nan], evaluations=1, optim__lr=0.2)
    write_run(tmp_path / "s" / "c", [2.0, 1.8, 1.7], evaluations=1, optim__lr=0.3)
    code, out, err = command("compare", tmp_path / "s")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[0] == "c"
    rows = {row["run"]: row for row in parquet.read_table(tmp_path / "s/comparison/runs.parquet").to_pylist()}
    assert [rows[name]["eval/loss"] for name in "abc"] == [None, None, 1.7]
    assert [rows[name]["eval/loss min"] for name in "abc"] == [1.5, None, 1.7]
    assert [rows[name]["best_loss"] for name in "abc"] == [1.5, None, 1.7]
    assert command("report", tmp_path / "s")[0] == 0
    assert command("report", tmp_path / "s" / "b")[0] == 0


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(sweep: Path, command: Command) -> None:
    Path("file").write_text("")
    _, _, err = command("compare", sweep, "out=file")
    assert "error: file cannot be written to: " in err
    assert "choose another place: out=FOLDER" in err
    _, _, err = command("report", sweep, "out=nowhere/report.html")
    assert "error: nowhere/report.html cannot be written: No such file or directory" in err
