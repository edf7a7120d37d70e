"""Every key is either mathematics or harmless, and it is written down here which."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from packages.unisono.tests import tasks
from unisono.config import fingerprint
from unisono.config.compose import ComposedConfig, apply_overrides
from unisono.config.schema.run import RunConfig
from unisono.task_config import load_config, validate_config

TASK = f"{tasks.__file__}:TransformerTask"
BASE = (
    "run.name=a", "optim.skip_spikes={history: 64}",
    "data={mixture: {weights: {a: 2}}, packing: {length: 4}}", "layout={strategy: fsdp, world_size: 2, micro_batch: 4}",
    "schedules.depth={kind: wsd, peak: 2}",
)  # fmt: skip


def keys(text: str) -> dict[str, str]:
    """Keys, each with another value than that of `BASE`."""
    words = (word.partition("=") for word in text.split())
    return {key: value for key, _, value in words}


HARMLESS = keys("""
    callbacks=[early_stopping]
    run.name=b run.dir=elsewhere run.resume=never run.allow_change=[optim.lr] run.stop_after=3
    layout.strategy=auto layout.world_size=4 layout.devices=2 layout.deterministic=true layout.shards=2
    layout.micro_batch=2 layout.max_memory_gb=3 layout.device=cpu layout.reduction=ordered layout.compile=true
    layout.activation_checkpointing=1 layout.defer_reduction=true layout.offload=true layout.find_unused_parameters=true
    layout.bucket_mb=3 layout.threads=1
    train.guard_every=7
    data.workers=2 data.worker_kind=processes data.prefetch=2 data.prefetch_mb=3 data.storage=remote
    optim.implementation=loop
    eval.every=3 eval.rows=3 eval.micro_batch=3 eval.weights=model eval.at_end=false
    eval.patience=3 eval.mode=max eval.metric=accuracy eval.harness=[a] eval.harness_limit=3
    eval.environment=a eval.environment_limit=3
    checkpoint.every=3 checkpoint.keep=3 checkpoint.keep_every=3 checkpoint.background=false
    checkpoint.on_failure=continue checkpoint.retry_for=1 checkpoint.final=model checkpoint.at_end=false
    checkpoint.folder=/scratch checkpoint.upload.url=s3://bucket/runs checkpoint.upload.keep=3
    checkpoint.upload.deadline=30 checkpoint.upload.timeout=30 checkpoint.upload.required=true
    observe.log_every=3 observe.progress=false observe.trackers=[tensorboard] observe.project=mine
    observe.tracker_timeout=3 observe.profile=[2,3] observe.norms=true observe.group=lr
    launch.timeout=3 launch.start_timeout=3 launch.initialization_timeout=3 launch.heartbeat_timeout=3 launch.nodes=2
    launch.node_rank=0 launch.rendezvous=10.0.0.1:29400 launch.interface=eth0 launch.desync=false
    launch.preempt_deadline=3 launch.monitor=false launch.stuck_after=3 launch.stuck_factor=3 launch.deadlines.setup=3
    launch.deadlines.shape=3 launch.deadlines.data=3 launch.deadlines.save=3 launch.deadlines.evaluate=3
    launch.straggler_factor=3 launch.max_restarts=3 launch.shared_folder=false
""")
MATHEMATICS = keys("""
    run.seed=1
    train.steps=7 train.epochs=2 train.tokens=90 train.global_batch=64 train.clip_norm=null train.precision=bf16
    layout.sync_batch_norm=true
    data.on_error=mask data.shuffle=none data.window=3 data.lanes=2 data.group_by_length=4 data.mixture.weights.a=1
    data.mixture.by=tokens data.mixture.until=first data.mixture.grouped=true data.mixture.block=10
    data.mixture.changes=[{step:3,weights:{a:1}}] data.packing.length=8 data.packing.method=offline
    data.packing.open_bins=3 data.packing.chunk=10 data.packing.cut=never
    task.rows=28 task.dropout=0.1 task.embedding_penalty=0.1
    ema.decay=0.5 ema.start=3 ema.every=3 ema.warmup=false ema.exclude=['*.bias']
    optim.kind=sgd optim.lr=1 optim.weight_decay=0.5 optim.decay_all=true optim.groups=[{match:'*.bias',lr_scale:2}]
    optim.skip_spikes.history=3 optim.skip_spikes.sigma=3 optim.skip_spikes.of=[loss] optim.skip_spikes.in_a_row=3
    optim.betas=[0.5,0.5] optim.eps=1e-4 optim.moments=moments.safetensors
    schedules.lr.kind=linear schedules.lr.warmup=0.2 schedules.lr.start=0.2 schedules.lr.floor=0.2
    schedules.lr.steps=5 schedules.depth.kind=linear schedules.depth.peak=3 schedules.depth.warmup=0.3
    schedules.depth.start=0.3 schedules.depth.floor=0.3 schedules.depth.steps=3 schedules.depth.decay=0.3
    schedules.depth.shape=sqrt
""")
BESIDE = {  # what has to change with a key for it to be allowed
    "data.group_by_length": ("data.packing=null",),
    "data.window": ("data.shuffle=blocks",),
    "train.epochs": ("train.steps=null",),
    "train.tokens": ("train.steps=null",),
    "layout.shards": ("layout.strategy=hsdp",),
    "layout.offload": ("layout.strategy=fsdp",),
    "layout.reduction": ("layout.strategy=auto",),
    "layout.bucket_mb": ("layout.strategy=auto",),
    "eval.harness_limit": ("eval.harness=[a]",),
    "eval.environment_limit": ("eval.environment=a",),
    "eval.patience": ("eval.every=2",),
    "eval.mode": ("eval.every=2", "eval.patience=2"),
    "eval.metric": ("eval.every=2", "eval.patience=2"),
    "ema.start": ("ema.decay=0.5",),
    "ema.every": ("ema.decay=0.5",),
    "ema.warmup": ("ema.decay=0.5",),
    "ema.exclude": ("ema.decay=0.5",),
    "launch.rendezvous": ("launch.nodes=2", "launch.node_rank=0"),
    "launch.interface": ("launch.nodes=2", "launch.node_rank=0", "launch.rendezvous=10.0.0.1:29400"),
    "launch.shared_folder": (
        "launch.nodes=2",
        "launch.node_rank=0",
        "launch.rendezvous=10.0.0.1:29400",
        "checkpoint.upload.url=s3://b/runs",
    ),
    "launch.nodes": ("launch.node_rank=1", "launch.rendezvous=10.0.0.1:29400"),
    "optim.kind": ("optim=sgd",),
    "schedules.depth.kind": ("schedules.depth={kind: linear, peak: 2}",),
    "schedules.depth.start": ("schedules.depth.warmup=0.3",),
}
NOT_TO_BE_CHANGED = {  # one value alone, or none, or keys of its own
    "recipe", "layout.engine", "model", "adapter", "schedules.lr.peak", "checkpoint.keep_best",
    "checkpoint.upload.options",
}  # fmt: skip


@cache
def composed() -> ComposedConfig:
    return load_config(TASK, BASE)[1]


def config(*overrides: str) -> RunConfig:
    if all(re.match(r"\w+\.[\w.]+=(?!\{kind)", word) for word in overrides):  # no file is chosen: composed once
        return validate_config(apply_overrides(composed(), overrides))
    base = BASE if not any(word.startswith("schedules.depth={") for word in overrides) else BASE[:-1]
    return load_config(TASK, (*base, *overrides))[0]


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return config()


def changed(key: str, value: str) -> RunConfig:
    beside = BESIDE.get(key, ())
    return config(*beside) if key.endswith(".kind") and beside else config(*beside, f"{key}={value}")


def test_every_key_is_listed_here_as_mathematics_or_as_harmless(base: RunConfig):
    assert set(fingerprint.flatten(fingerprint.to_json(base))) - NOT_TO_BE_CHANGED == set(HARMLESS) | set(MATHEMATICS)


@pytest.mark.parametrize(("key", "value"), HARMLESS.items())
def test_a_harmless_key_makes_no_other_run_and_no_other_digest(base: RunConfig, key: str, value: str):
    other = changed(key, value)
    assert fingerprint.flatten(fingerprint.to_json(other))[key] != fingerprint.flatten(fingerprint.to_json(base))[key]
    assert fingerprint.changed_keys(base, other, random=False) == {}
    assert fingerprint.config_digest(base) == fingerprint.config_digest(other)


def test_another_engine_makes_another_run(base: RunConfig):
    torch, jax = (
        base.model_copy(update={"layout": base.layout.model_copy(update={"engine": engine})})
        for engine in ("torch", "jax")
    )
    assert fingerprint.changed_keys(torch, jax, random=False) == {"layout.engine": ("torch", "jax")}
    assert fingerprint.changed_keys(base, jax, random=False) == {}  # auto: nobody has decided yet
    assert fingerprint.config_digest(torch) == fingerprint.config_digest(base)


def test_which_checkpoint_is_the_best_makes_no_other_run(base: RunConfig):
    other = config("eval.every=2", "checkpoint.keep_best={metric: accuracy, mode: max}")
    assert other.checkpoint.keep_best is not None
    assert fingerprint.changed_keys(base, other, random=False) == {}


@pytest.mark.parametrize(("key", "value"), MATHEMATICS.items())
def test_a_mathematical_key_makes_another_run_and_is_named(base: RunConfig, key: str, value: str):
    other = changed(key, value)
    found = fingerprint.changed_keys(base, other, random=False)
    assert found[key] == tuple(fingerprint.flatten(fingerprint.to_json(c))[key] for c in (base, other))
    assert fingerprint.config_digest(base) != fingerprint.config_digest(other)


def test_adapters_and_each_of_their_settings_make_another_run(base: RunConfig):
    lora = config("adapter=lora")
    assert "adapter.kind" in fingerprint.changed_keys(base, lora, random=False)
    for word in ("rank=4", "alpha=2", "dropout=0.1", "targets=[query]"):
        other = config("adapter=lora", f"adapter.{word}")
        assert list(fingerprint.changed_keys(lora, other, random=False)) == [f"adapter.{word.partition('=')[0]}"]


def test_the_place_of_the_task_s_file_makes_no_other_run(base: RunConfig):
    for recipe in (
        "moved/tasks.py:TransformerTask",
        "/moved/tasks.py:TransformerTask",
        "packages.unisono.tests.tasks:TransformerTask",
    ):
        moved = base.model_copy(update={"recipe": recipe})
        assert fingerprint.changed_keys(base, moved, random=False) == {}
        assert fingerprint.config_digest(moved) == fingerprint.config_digest(base)


@pytest.mark.parametrize("recipe", ["tasks.py:Other", "other.py:TransformerTask", "tests.other:TransformerTask"])
def test_another_task_makes_another_run(base: RunConfig, recipe: str):
    other = base.model_copy(update={"recipe": recipe})
    assert fingerprint.changed_keys(base, other, random=False).keys() == {"recipe"}
    assert fingerprint.config_digest(other) != fingerprint.config_digest(base)


def test_the_micro_batch_makes_another_run_where_a_forward_pass_is_random(base: RunConfig):
    other = config("layout.micro_batch=2")
    assert fingerprint.changed_keys(base, other, random=True) == {"layout.micro_batch": (4, 2)}


def test_rows_that_draw_on_several_devices_make_another_run(base: RunConfig):
    other = config("layout.strategy=dp", "layout.world_size=1")
    strategy = base.layout.strategy
    assert fingerprint.changed_keys(base, other, random=False) == {}
    assert fingerprint.changed_keys(base, other, random=True) == {"layout.strategy": (strategy, "dp")}


def test_a_key_that_only_one_configuration_has_is_a_change():
    adamw, sgd = config(), config("optim=sgd")
    found = fingerprint.changed_keys(adamw, sgd, random=False)
    assert found["optim.betas"] == ([0.9, 0.95], None)
    assert found["optim.momentum"] == (None, 0.0)


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ({"a": {"b": 1, "c": {"d": 2}}, "e": 3}, {"a.b": 1, "a.c.d": 2, "e": 3}),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1}]}),
        ({"a": {}}, {"a": {}}),
    ],
)
def test_values_are_flattened_to_dotted_keys_and_lists_stay_whole(values: dict[str, Any], flat: dict[str, Any]):
    assert fingerprint.flatten(values) == flat
