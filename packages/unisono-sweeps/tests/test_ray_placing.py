"""What `launcher=ray` makes of a host that is lost, without a cluster: `test_ray.py` has real ones."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.launch.launcher import Ended, Job
from unisono_sweeps.launchers import ray

LOST = Ended(ray._LOST, 1.0, "a host of the run is lost: The actor died.")


@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (1, ray._LOST)])
def test_a_run_that_loses_its_host_is_placed_again_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restarts: int, code: int
) -> None:
    placed: list[str] = []
    ends = {"a": [LOST, LOST, Ended(0, 3.0)], "b": [Ended(0, 2.0)]}

    def place(self: ray.RayLauncher, job: Job) -> SimpleNamespace:
        placed.append(job.name)
        how = ends[job.name].pop(0)
        return SimpleNamespace(job=job, poll=lambda: how, release=lambda: None, stop_requested=False)

    monkeypatch.setattr(ray, "import_extra", lambda *_, **__: None)
    monkeypatch.setattr(ray, "_POLL", 0.0)
    monkeypatch.setattr(ray.RayLauncher, "_place", place)
    monkeypatch.setattr(ray.RayLauncher, "_connected", lambda self: nullcontext())
    launcher = ray.RayLauncher(ray.RayLauncher.Settings(jobs=2, max_restarts=restarts))
    started: list[str] = []
    ended: dict[str, int] = {}
    jobs = [Job(name, (), Path(name), Path("log")) for name in "ab"]
    launcher.run(jobs, lambda job: started.append(job.name), lambda job, how: ended.update({job.name: how.code}))
    assert started == ["a", "b"]
    assert ended == {"a": code, "b": 0}
    assert placed.count("a") == 1 + restarts
    assert capsys.readouterr().err.count("a host of the run is lost: The actor died.; it resumes") == restarts


def test_a_stopped_run_is_not_placed_again_when_its_host_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pruned trial would train to its end."""
    ends = [None, LOST]
    one = SimpleNamespace(poll=lambda: ends.pop(0), release=lambda: None, stop_requested=False)
    one.stop = lambda: setattr(one, "stop_requested", True)
    monkeypatch.setattr(ray, "import_extra", lambda *_, **__: None)
    monkeypatch.setattr(ray, "_POLL", 0.0)
    monkeypatch.setattr(ray.RayLauncher, "_connected", lambda self: nullcontext())
    placed: list[Job] = []

    def place(self: ray.RayLauncher, job: Job) -> SimpleNamespace:
        placed.append(job)
        one.job = job
        return one

    monkeypatch.setattr(ray.RayLauncher, "_place", place)
    launcher = ray.RayLauncher(ray.RayLauncher.Settings(jobs=1, max_restarts=2))
    ended: list[int] = []
    job = Job("a", (), Path("a"), Path("log"))
    launcher.run([job], lambda job: None, lambda job, how: ended.append(how.code), lambda job: True)
    assert (ended, placed) == ([ray._LOST], [job])
