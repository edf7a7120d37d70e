"""Which updates of the runs of a script are compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.proof.cases import Case
from unisono.proof.scripts.recording.rank_facts import RankFacts
from unisono.proof.scripts.replay.reading import ReadingFacts, write_reading
from unisono.proof.scripts.replay.replay_runs import Group, leave_out_rounded_rows, leave_out_rounding


@pytest.mark.parametrize(
    ("apart", "next_epoch", "kept"),
    [
        ({}, 0, 9),
        ({8: 1e-9}, 0, 7),
        ({6: 1e-13}, 0, 9),  # below what is allowed in any case
        ({3: 1e-9, 8: 4e-9}, 0, 9),  # nothing more than rounding has come to before
        ({3: 1e-9, 8: 4e-8}, 0, 7),
        ({8: 1e-9}, 8, 9),  # the second epoch begins with it
        ({2: 1e-3}, 0, 9),  # the script does not repeat, which is said
    ],
)
def test_updates_in_which_rounding_has_grown_are_left_out(
    tmp_path: Path, apart: dict[int, float], next_epoch: int, kept: int
) -> None:
    """Else they would widen what is allowed of all updates, or leave nothing to compare of a script that amplifies."""
    cases = [Case("one", 1, {}, "fp64"), Case("again", 1, {}, "fp64"), Case("many", 2, {}, "fp64", "one")]
    traces: dict[str, Any] = {}
    for case in cases:
        steps = [
            build_step([[]] * case.world_size, loss=1.0 + (apart.get(step, 0.0) if case.name == "again" else 0.0))
            for step in range(1, 10)
        ]
        traces[case.name] = write_script_trace(tmp_path / case.name, [[RankFacts()] * case.world_size] * 9, steps)
    write_reading(tmp_path / "one", 0, ReadingFacts(True, False, "", next_epoch=next_epoch), [])
    runs: Any = SimpleNamespace(traces=traces)
    leave_out_rounding(runs, Group(cases[0], cases[1], cases[2:]), 4)
    assert {name: (len(trace.facts.steps), len(trace.ranks)) for name, trace in traces.items()} == dict.fromkeys(
        ("one", "again", "many"), (kept, kept)
    )


@pytest.mark.parametrize(
    ("step", "others", "kept"),
    [(6, 1, 5), (6, 2, 5), (6, 3, 9), (4, 1, 9), (5, 1, 4)],  # of four rows, in updates of which four were asked for
)
def test_updates_in_which_few_rows_have_other_digits_are_left_out(
    tmp_path: Path, step: int, others: int, kept: int
) -> None:
    """One row that a generator made, rounded otherwise in update 11, left nothing to compare of the ten before it."""
    facts = [build_step([[]]) for _ in range(9)]
    traces = [
        write_script_trace(
            tmp_path / name,
            [
                [RankFacts(inputs=[*"abcd"[made if n == step else 0 :], *"wxyz"[: made if n == step else 0]])]
                for n in range(1, 10)
            ],
            facts,
        )
        for name, made in (("many", 0), ("one", others))
    ]
    leave_out_rounded_rows(traces[0], traces[1], 4)
    assert [(len(trace.facts.steps), len(trace.ranks), trace.is_cut) for trace in traces] == [
        (kept, kept, kept < 9)
    ] * 2
