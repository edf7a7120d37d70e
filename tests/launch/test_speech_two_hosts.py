"""Two hosts with two processes each evaluate every held-out row once, and write what is heard once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs
from recipes.speech.tests import made
from recipes.speech.tests.test_layouts import TOLERANCE
from tests.launch import namespaces
from unisono.observe import events

NO_HOSTS = namespaces.missing()
SMALL = [word for word in made.OVERRIDES if word != "observe.progress=false"]
TRAIN = (
    "train", "speech", *SMALL, "data.clips=8", "run.dir=runs", "run.name=a", "train.steps=4", "eval.every=2",
    "train.precision=fp64", "layout.device=cpu", "layout.strategy=ddp", "task.shown=1", "checkpoint.every=4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(NO_HOSTS is not None, reason=f"no namespaces: {NO_HOSTS}")
def test_two_hosts_evaluate_what_one_process_evaluates(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    cache = {"UNISONO_CACHE": str(tmp_path / "cache")}
    alone = tuple(word for word in TRAIN if not word.startswith("layout.strategy"))
    done = jobs.unisono(*alone, "layout.world_size=1", cwd=one, **cache)
    assert done.returncode == 0, done.stderr
    meet = ("layout.world_size=4", "launch.nodes=2", f"launch.rendezvous=10.99.0.1:{namespaces.PORT}")
    with namespaces.hosts() as pair, ExitStack() as stack:
        commands = [host.command(jobs.UNISONO, *TRAIN, *meet, f"launch.node_rank={n}") for n, host in enumerate(pair)]
        started = [stack.enter_context(jobs.started(words, two, **cache)) for words in commands]
        told = jobs.ends(started, 300)
    assert [host.returncode for host in told] == [0, 0], told
    mine, theirs = (events.read_events(folder / "runs" / "a" / "events.jsonl") for folder in (one, two))
    evaluated = [[event for event in found if event.get("eval")] for found in (mine, theirs)]
    assert [event["step"] for event in evaluated[0]] == [event["step"] for event in evaluated[1]] == [2, 4]
    for ours, others in zip(*evaluated, strict=True):
        assert ours["rows"] == others["rows"] > 1
        named = [name for name in ours if name.startswith(("loss", "accuracy"))]
        assert len(named) > 15
        for name in named:
            assert others[name] == pytest.approx(ours[name], rel=10 * TOLERANCE)
    shown = [line for line in told[0].stdout.splitlines() if line.startswith("eval after step")]
    assert (len(shown), told[1].stdout) == (2, "")
    samples = sorted(path.name for path in (two / "runs" / "a" / "samples").iterdir())
    assert samples == [f"step-0000000{n}-0{end}" for n in (2, 4) for end in ("-predicted.wav", "-true.wav", ".png")]
