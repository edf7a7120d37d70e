"""Trackers: where a run's metrics go in addition to its own files. Only rank 0 has them, and training never waits.

Every tracker runs in its own thread behind a bounded queue, so a network that hangs causes a warning and does not stop
the run. The price is that a tracker may lag behind and loses what it has not accepted by the end; `events.jsonl` has
everything in any case. The ids of tracked runs are kept in the run directory, so a resumed run continues the same one.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from unisono.config import CONFIG_FILE, safe_yaml
from unisono.observe import events
from unisono.observe.samples import Sample, prepare_sample
from unisono.runtime import secrets
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, RunError, nearest
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths

log = logging.getLogger(__name__)

IDS = "trackers.json"  # in the run directory: the id of the tracked run for each tracker
NAMES = ("tensorboard", "wandb", "trackio")  # those of the core, each with an extra of its name
_GROUP = "unisono.trackers"
_MAX_PENDING = 10_000  # queued events per tracker, beyond which new ones are dropped


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives about its run. It contains no secrets.

    Attributes:
        folder: The run's directory.
        name: Of the run.
        project: The project that it belongs to.
        id: Of the tracked run; unique, and the same after every resumption.
        first_step: Steps done before; 0 for a new run.
        config: The whole configuration, nested; empty if the tracker already has it.
        facts: Versions, host, devices, and the task's facts about its data; empty if the tracker already has them.
        timeout: Seconds that a tracker may take to finish.
        group: Of runs that belong together, as those of a sweep; None if the run is in none.
    """

    folder: Path
    name: str
    project: str
    id: str
    first_step: int
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    group: str | None = None


class Tracker(Protocol):
    """One tracker. It is created from a `TrackedRun`, used by a single thread, and may raise at any time.

    It may also have `text(step, name, text)` and `table(step, name, columns, rows)`; without them, texts and tables are
    left out there, and that is said once.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by name after `step` steps. Several calls may have the same step."""
        ...

    def picture(self, step: int, name: str, path: Path) -> None:
        """Write a PNG file under a name."""
        ...

    def sound(self, step: int, name: str, path: Path) -> None:
        """Write a WAV file under a name."""
        ...

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Write remaining data, the latest value of everything, and whether the run ended with an error."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that cannot start: unknown, not installed, or without login credentials.

    Raises:
        ConfigError: With the remedy.
    """
    for name in names:
        if name not in NAMES and name not in find_entry_points(_GROUP):
            known = [*NAMES, *find_entry_points(_GROUP)]
            raise ConfigError(f"observe.trackers={name}: no such tracker is installed, {nearest(name, known)}")
        if name in NAMES and find_spec(name) is None:
            raise ConfigError(f"observe.trackers={name} needs {name}: pip install 'unisono[{name}]'")
        own: Callable[[], None] | None = getattr(_tracker_module(name), "check", None)
        if own is not None:
            own()


class Trackers:
    """All trackers of a run as one; see the module.

    Args:
        runs: What a tracker receives, by tracker name.
        timeout: Seconds for all of them to finish.
    """

    def __init__(self, runs: Mapping[str, TrackedRun], timeout: float) -> None:
        self._timeout = timeout
        self._lines = [_TrackerThread(name, run) for name, run in runs.items()]
        self._summary: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values for every tracker; never waits."""
        self._summary |= values
        for line in self._lines:
            line.put(("write", step, dict(values)))

    def publish(self, step: int, name: str, sample: Sample) -> None:
        """Queue a picture, a sound, a text or a table for every tracker; never waits."""
        for line in self._lines:
            line.put((sample.kind, step, name, *sample.content))

    def close(self, failed: bool = False) -> None:
        """Let every tracker finish, all within one deadline."""
        deadline = monotonic() + self._timeout
        for line in self._lines:
            line.put(("close", dict(self._summary), failed))
        for line in self._lines:
            line.join(max(0.0, deadline - monotonic()), self._timeout)


class _TrackerThread:
    """One tracker, its thread, and its queue."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name, self._run = name, run
        self._pending: queue.Queue[tuple[Any, ...]] = queue.Queue(_MAX_PENDING)
        self._ended = threading.Event()
        self._dropped = 0
        self._left_out = set[str]()  # kinds of samples that the tracker cannot show
        self._thread = threading.Thread(target=self._work, name=f"unisono-{name}", daemon=True)
        self._thread.start()

    def put(self, call: tuple[Any, ...]) -> None:
        if self._ended.is_set():
            return
        try:
            self._pending.put_nowait(call)
        except queue.Full:
            if call[0] == "close":  # must not be lost
                self._pending.get_nowait()
                self._pending.put_nowait(call)
            elif not self._dropped:
                log.warning("%s is %d events behind; new events are dropped for it", self._name, _MAX_PENDING)
            self._dropped += 1

    def join(self, seconds: float, timeout: float) -> None:
        self._ended.wait(seconds)
        if not self._ended.is_set():
            late = "%s did not finish within %g s (observe.tracker_timeout) and was abandoned; "
            log.warning(late + "events.jsonl has everything", self._name, timeout)
        if self._dropped:
            log.warning("%s: %d events were dropped; events.jsonl has them", self._name, self._dropped)

    def _leave_out(self, kind: str) -> None:
        if kind not in self._left_out:
            self._left_out.add(kind)
            log.warning("%s cannot show a %s; it is left out there, and events.jsonl has it", self._name, kind)

    def _work(self) -> None:
        try:
            tracker: Tracker = _tracker_module(self._name).Tracker(self._run)
            while True:
                what, *arguments = self._pending.get()
                show = getattr(tracker, what, None)
                if show is None:
                    self._leave_out(what)
                    continue
                show(*arguments)
                if what == "close":
                    return
        except BaseException as error:  # libraries also raise SystemExit, which must not affect training
            why = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            log.warning(
                "%s failed (%s); the run continues without it, and events.jsonl has everything", self._name, why
            )
        finally:
            self._ended.set()


def open_trackers(
    names: Sequence[str],
    folder: Path,
    project: str,
    first_step: int,
    config: Any,
    facts: Any,
    timeout: float,
    group: str | None = None,
) -> Trackers:
    """Open the trackers of a run, on rank 0.

    Args:
        names: Of trackers.
        folder: The run's directory.
        project: For trackers that have projects.
        first_step: Steps done before.
        config: Nested values; secrets are masked before trackers receive them.
        facts: Likewise.
        timeout: Seconds that they have to finish.
        group: Of runs that belong together.
    """
    check_trackers(names)
    ids = _ensure_ids(folder, names)
    shown = secrets.hidden(config), secrets.hidden(facts)
    runs = {
        name: TrackedRun(folder, folder.name, project, ids[name], first_step, *shown, timeout, group) for name in names
    }
    return Trackers(runs, timeout)


def show_samples(folder: Path, samples: Mapping[str, Any]) -> list[str]:
    """Send samples to the events and the trackers of a run, waiting no longer than at the end of a run.

    As in training, a tracker that fails only causes a warning.

    Args:
        folder: The run's directory.
        samples: By display name; see `samples.prepare_sample`.

    Returns:
        The names of the run's trackers.

    Raises:
        ConfigError: For a tracker that is no longer installed, or has no key.
    """
    observe = safe_yaml.read_yaml(folder / CONFIG_FILE)["observe"]
    names = [name for name in observe["trackers"] if name in read_ids(folder)]
    path = folder / "events.jsonl"
    step = max((event["step"] for event in events.read_events(path)), default=0) if samples else 0
    prepared = {name: prepare_sample(folder, step, name, value) for name, value in samples.items()}
    for name, sample in prepared.items():
        if sample.event is not None:
            events.append_event(path, {"step": step, "sample": name, **sample.event})
    if names and prepared:
        timeout, group = observe["tracker_timeout"], observe.get("group")
        opened = open_trackers(names, folder, observe["project"], step, {}, {}, timeout, group)
        for name, sample in prepared.items():
            opened.publish(step, name, sample)
        opened.close()
    return names


def read_ids(folder: Path) -> dict[str, str]:
    """Return the ids of the tracked runs by tracker, for checkpoints; empty if there are none.

    Raises:
        RunError: If the file is damaged.
    """
    path = folder / IDS
    try:
        return dict(safe_paths.read_json(folder, IDS, dict[str, str])) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}; remove it, and the run is tracked as a new one") from error


def restore_ids(folder: Path, kept: Mapping[str, str]) -> None:
    """Restore ids saved in a checkpoint if they are missing; existing ids take precedence."""
    known = read_ids(folder)
    if kept.keys() - known.keys():
        write_whole(folder / IDS, json.dumps({**kept, **known}, indent=1) + "\n")


def _ensure_ids(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the id of each tracked run, creating ids for new trackers."""
    known = read_ids(folder)
    missing = {name: uuid.uuid4().hex[:12] for name in names if name not in known}
    if missing:
        write_whole(folder / IDS, json.dumps({**known, **missing}, indent=1) + "\n")
    return {**known, **missing}


def _tracker_module(name: str) -> Any:
    """The module of a tracker: its class `Tracker`, and a function `check` if something can be missing."""
    if name in NAMES:
        return import_module(f"unisono.observe.{name}")
    return find_entry_points(_GROUP)[name].load()
