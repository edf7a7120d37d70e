"""Every setting of the schema is used by an engine, or refused where it means nothing: there is no third way.

Small runs go through each engine while every process writes down which settings it reads. What none of them has read
must be refused by all of them as soon as it has another value than its default. Both are found out, not listed: a new
setting is held by this test from its first day.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from packages.unisono.tests.config import recording
from packages.unisono.tests.launch import jobs
from unisono.config.schema import Only, Settings
from unisono.config.schema.data import Data
from unisono.config.schema.optimizers import Optimizer
from unisono.config.schema.run import Lora, RunConfig
from unisono.config.schema.schedules import Schedule
from unisono.launch.resolving import layout
from unisono.runtime.errors import ConfigError
from unisono.task_config import load_config

JAX = """
import equinox as eqx
import jax
import numpy as np
import unisono


class Small(unisono.Task):
    engine = "jax"

    def rows(self, seed, count):
        inputs = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
        return [{"x": x, "y": x.sum(keepdims=True)} for x in inputs]

    def data(self):
        return self.rows(1, 40)

    def held_out(self):
        return self.rows(2, 9)

    def counts(self, batch):
        return {"square": float(len(batch["x"]))}

    def build(self, key):
        return eqx.nn.Linear(3, 1, key=key)

    def outputs(self, model, batch, context):
        return jax.vmap(model)(batch["x"])

    def loss(self, outputs, batch, context):
        return unisono.Loss({"square": ((outputs - batch["y"]) ** 2).sum(-1)})
"""
TASKS = {"torch": jobs.SMALL, "jax": JAX}
KINDS = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Schedule)[0])}
NEEDED = {"exponential": ", floor: 0.1"}
OTHERS = [f"{name}: {{kind: {name}, peak: 1{NEEDED.get(name, '')}}}" for name in KINDS if name != "plateau"]
SCHEDULES = f"schedules={{lr: {{kind: plateau, warmup: 1}}, {', '.join(OTHERS)}}}"
FULL = (
    "ema.decay=0.9", "checkpoint.every=2", "checkpoint.keep_best={metric: loss}", "eval.every=2", "train.steps=4",
    SCHEDULES, "observe.profile=[2,2]", "observe.trackers=[tensorboard]",
    "callbacks=[{callback: early_stopping, metric: loss, patience: 9}]", "data.workers=2",
)  # fmt: skip
STORE = "checkpoint.upload.url=file://{folder}/store"
NO_UPLOAD = ("layout.world_size=1", "train.steps=2", STORE)
LOST_DISK = (
    "layout.world_size=1", "train.steps=2", "checkpoint.every=1", "checkpoint.background=false",
    "checkpoint.on_failure=continue", "checkpoint.retry_for=0.1",
)  # fmt: skip
SETUP = """
import errno
import os
import recording

def fail(*_):
    raise OSError(errno.EIO, "the disk is gone")


if os.environ.get("BROKEN") == "lost disk":
    from unisono.checkpoint.core import commit

    commit._write_file = fail
if os.environ.get("BROKEN") == "no upload":
    from unisono.checkpoint.remote.upload import Uploads

    Uploads._link_files = fail
"""
EPOCHS = ("train.epochs=1", "train.steps=null")
MUON = ("optim=muon", 'optim.groups=[{match: "*weight", muon: true}]')
RUNS = {
    "torch": {
        "full": (*FULL, "layout.world_size=1", STORE, "optim=adamw"),
        "adapter": ("adapter=lora", "train.steps=2", "layout.world_size=1", "layout.micro_batch=auto", "optim=lion"),
        "no upload": (*NO_UPLOAD, "optim=adam_atan2"),
        "lost disk": (*LOST_DISK, "optim=adafactor"),
        "ddp": ("layout.world_size=2", "train.steps=2", "data.worker_kind=processes", *MUON),
        "hsdp": (
            "layout.world_size=2", "layout.strategy=hsdp", "layout.shards=2", "layout.micro_batch=2", "optim=sgd",
            *EPOCHS,
        ),
    },
    "jax": {
        "full": (*FULL, "layout.world_size=1", STORE, "optim=adamw"),
        "muon": ("layout.world_size=1", "train.steps=1", *MUON),
        "lost disk": (*LOST_DISK, "optim=lion"),
        "no upload": (*NO_UPLOAD, "optim=adam_atan2"),
        "processes": ("layout.world_size=2", "train.steps=2", "layout.devices=1", "optim=adafactor"),
        "epochs": ("layout.devices=2", "layout.strategy=hsdp", "layout.shards=2", "optim=sgd", *EPOCHS),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """A setting: its dotted key, the name under which its reads are recorded, and another value than its default.

    `chosen` are the words by which a run has the group that it belongs to, of those of which it chooses one.
    """

    dotted: str
    recorded: str
    other: Any
    only: str | None
    chosen: tuple[str, ...] = ()


def all_keys() -> Iterator[Key]:
    """Those that are always there, of each optimizer and schedule, and of adapters; a task's are its own affair."""
    yield from keys(RunConfig)
    for kind in get_args(get_args(Optimizer)[0]):
        name = get_args(kind.model_fields["kind"].annotation)[0]
        yield from keys(kind, "optim.", MUON if name == "muon" else (f"optim={name}",))
    yield from keys(Lora, "adapter.", ("adapter=lora",))
    for name, schedule in KINDS.items():
        yield from keys(
            schedule, "schedules.lr.", (f"schedules={{lr: {{kind: {name}{NEEDED.get(name, '')}}}}}", "eval.every=1")
        )


def keys(kind: type[Settings], prefix: str = "", chosen: tuple[str, ...] = ()) -> Iterator[Key]:
    """All settings of a group at any depth."""
    for name, field in kind.model_fields.items():
        if kind is RunConfig and name in ("recipe", "task", "model", "optim", "schedules", "adapter", "callbacks"):
            continue
        if chosen and name in ("kind", "rest"):  # which of them, and one that comes by itself
            continue
        inner = Data if kind is RunConfig and name == "data" else field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            yield from keys(inner, f"{prefix}{name}.")
            continue
        only = next((mark.engine for mark in field.metadata if isinstance(mark, Only)), None)
        yield Key(f"{prefix}{name}", f"{kind.__name__}.{name}", other_value(field), only, chosen)


def other_value(field: Any) -> Any:
    """A value that the type of a field allows and that is not its default."""
    kind = TypeAdapter(Annotated[field.annotation, *field.metadata, "a setting"])
    for value in _values(field.annotation, field.metadata):
        with suppress(ValidationError):  # a value out of range would be refused for that
            if kind.validate_python(value) != field.get_default():
                return value
    raise AssertionError(field)


def _values(kind: Any, metadata: Any = ()) -> Iterator[Any]:
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _values(get_args(kind)[0], [*metadata, *get_args(kind)[1:]])
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _values(each, metadata)
    elif origin is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from (True, False)
    elif kind in (int, float):
        yield from (kind(2), kind(3), kind(0.5), kind(0.25), kind(-1))
    elif kind in (str, Path):
        yield "other"
    elif isinstance(kind, type) and issubclass(kind, Settings):
        needed = {n: next(_values(f.annotation, f.metadata)) for n, f in kind.model_fields.items() if f.is_required()}
        yield kind.model_validate(needed).model_dump(mode="json")
    elif origin is list:
        yield []
        yield [next(_values(get_args(kind)[0]))]
    elif origin is dict:
        yield {"other": next(_values(get_args(kind)[1]), "other")}
        yield {"anon": True}  # an option of a store
    elif origin is tuple:
        yield from ([value] * len(get_args(kind)) for value in (2, 0.5))


def words_of(folder: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.replace("{folder}", str(folder)) for word in (*jobs.QUIET, *words))


@pytest.fixture(scope="module", params=list(RUNS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, set[str]]:
    """An engine, the folder of its task, and what its runs have read."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    (folder / "small.py").write_text(f"{SETUP}{TASKS[name]}", encoding="utf-8")
    reads = folder / "reads.txt"
    path = os.pathsep.join([str(Path(recording.__file__).parent), os.environ.get("PYTHONPATH", "")])
    for run, words in RUNS[name].items():
        done = jobs.unisono(
            "train", "small.py:Small", *words_of(folder, words), f"run.name={run}", cwd=folder, timeout=300,
            PYTHONPATH=path, BROKEN=run, **{recording.VARIABLE: str(reads)},
        )  # fmt: skip
        assert done.returncode == (7 if run == "lost disk" else 0), (run, done.stderr)
    return name, folder, set(reads.read_text(encoding="utf-8").splitlines())


@pytest.mark.slow
def test_a_setting_is_used_or_refused(engine: tuple[str, Path, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder, reads = engine
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(Path(recording.__file__).parent))
    ignored = [
        key.dotted
        for key in all_keys()
        if key.recorded not in reads and not all(is_refused(folder, words, key) for words in RUNS[name].values())
    ]
    assert not ignored, f"accepted, and never looked at by the {name} engine"


@pytest.mark.parametrize("name", list(RUNS))
def test_a_setting_of_one_engine_is_refused_by_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "jax":
        pytest.importorskip("equinox", reason="equinox is not installed")
    (tmp_path / "small.py").write_text(TASKS[name], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    others = [key for key in all_keys() if key.only not in (None, name)]
    assert others
    for key in others:
        for more in ((), (f"layout.engine={name}",)):  # also where nobody names the engine
            with pytest.raises(ConfigError, match=f"{key.dotted} belongs to layout.engine={key.only}"):
                resolved(("train.steps=1", "layout.world_size=1", *more), key)


def resolved(words: tuple[str, ...], key: Key) -> RunConfig:
    group = key.dotted.split(".")[0]
    kept = [word for word in words if not (key.chosen and word.startswith((f"{group}=", f"{group}.")))]
    chosen = [word for word in key.chosen if not word.startswith(f"{key.dotted}=")]
    config, _ = load_config("small.py:Small", [*kept, *chosen, f"{key.dotted}={_written(key.other)}"])
    return layout.resolve_layout(config, None)


def is_refused(folder: Path, words: tuple[str, ...], key: Key) -> bool:
    try:
        resolved(words_of(folder, words), key)
    except ConfigError:
        return True
    return False


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
