"""Builds the source and the plan of a run from its settings: mixing, shuffling and packing, with their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unisono.config.batch_split import rows_of_sources
from unisono.config.schema.run import RunConfig
from unisono.data.loading.batch_builder import refuse_mask
from unisono.data.loading.loader import MeasuredLengths, check_draws
from unisono.data.order import lanes as lanes_
from unisono.data.order.blocks import BlockOrder, CachedBlocks
from unisono.data.order.grouped import GroupedOrder
from unisono.data.order.lanes import SINGLE_LANE, Lanes
from unisono.data.order.mixture import Joined, MixtureOrder, sources_of, whole_weights
from unisono.data.order.order import Order
from unisono.data.order.packed_plan import PackedPlan
from unisono.data.order.plan import LengthGroups, Plan, Stream, StreamPlan
from unisono.protocols import packed_capacity, require_packable, resolve_features
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.rng import key
from unisono.task import Source, Task, run_setup

_ROWS_MEASURED = 1 << 16  # of a mixture, for the mean length of its rows


def build_source(task: Task, config: RunConfig | None = None, world_size: int = 1) -> Source:
    """The task's rows, with several sources joined into one; errors explain why they cannot be used.

    Args:
        task: what to train.
        config: of the run; None if only the rows matter.
        world_size: number of processes, which share the lanes.
    """
    run_setup(task)
    given = task.data()
    several = isinstance(given, Mapping)
    sources: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"": given}
    if not sources or not all(isinstance(name, str) for name in sources):
        fault = f"names its sources {list(sources)[:3]}; names must be strings" if sources else "returned no sources"
        raise DataError(f"{type(task).__name__}.data() {fault}")
    sources = dict(sorted(sources.items()))  # so that the order of the dict does not matter
    for name, one in sources.items():
        _check_rows(one, f"{type(task).__name__}.data()" + (f"[{name!r}]" if several else ""))
    sources = {name: one if hasattr(one, "__getitem__") else CachedBlocks(one) for name, one in sources.items()}
    if config is not None and config.data.shuffle == "blocks":
        blocks = _max_blocks(sources)
        lanes = lanes_.resolve_lane_count(config.data.lanes, config.train.global_batch, world_size, blocks)
        kept = (config.data.window + 2) * (lanes // world_size)  # its lanes' windows, and a few of the next blocks
        for one in sources.values():
            if hasattr(one, "keep_blocks"):  # other sources need no cache
                one.keep_blocks(kept)
    mixture = None if config is None else config.data.mixture
    mask = config is not None and config.data.on_error == "mask"
    if mask:
        refuse_mask(task)
    for name, one in sources.items():
        if mixture is None or any(w.get(name) for w in (mixture.weights, *(c.weights for c in mixture.changes))):
            check_draws(task, one, mask=mask)  # sources without any weight are never read
    return Joined(sources) if several else sources[""]


def build_plan(task: Task, source: Source, config: RunConfig, world_size: int | None = None) -> Plan:
    """The plan: the samples that each step consumes.

    Args:
        task: what to train.
        source: from `build_source`.
        config: of the run.
        world_size: number of processes; None for the layout's.

    Raises:
        ConfigError: if settings of `data` do not fit the sources, the batch or the number of processes.
    """
    data, train = config.data, config.train
    world = config.layout.world_size if world_size is None else world_size
    assert isinstance(world, int)
    if data.mixture is not None and not isinstance(source, Joined):
        raise ConfigError(
            f"data.mixture has weights for {', '.join(data.mixture.weights)}, but {type(task).__name__}.data() returns "
            "a single source; return a dict of sources, or remove data.mixture"
        )
    if data.mixture is not None and data.mixture.grouped:
        other = ("data.packing", data.packing), ("data.group_by_length", data.group_by_length)
        for key_, value in (*other, ("data.shuffle=blocks", data.shuffle == "blocks" or None)):
            if value is not None:
                raise ConfigError(
                    f"data.mixture.grouped gives each source its rows of a batch, but {key_} moves them; "
                    "leave out one of the two"
                )
    sources = sources_of(source)
    if data.shuffle == "full" and any(isinstance(one, CachedBlocks) for one in sources.values()):
        raise ConfigError(
            f"{type(task).__name__}.data() has a source that reads only whole blocks, and data.shuffle=full would read "
            "one for nearly every row; use data.shuffle=blocks, or give the source a __getitem__"
        )
    blocks = _max_blocks(sources) if data.shuffle == "blocks" else None
    if train.tokens is not None:
        steps = _steps_of_tokens(task, source, config)
        train = train.model_copy(update={"steps": steps, "tokens": None})
    if data.packing is None and blocks is None:
        stream = _build_stream(task, source, config, SINGLE_LANE)
        return StreamPlan.create(
            stream, train.global_batch, train.steps, train.epochs, _length_groups(task, source, config)
        )
    count = lanes_.resolve_lane_count(data.lanes, train.global_batch, world, blocks)
    if data.packing is not None:
        chunks = SINGLE_LANE if blocks is None else Lanes(count, data.packing.chunk)
        stream = _build_stream(task, source, config, chunks)
        require_packable(task)
        lengths = getattr(source, "lengths", None)
        if lengths is None:  # known only once samples are built
            lengths = MeasuredLengths(task, source, config.run.seed, mask=data.on_error == "mask")
        return PackedPlan.from_config(stream, lengths, train, data, capacity=packed_capacity(task), lanes=count)
    stream = _build_stream(task, source, config, Lanes(count, train.global_batch // count))
    if train.epochs is not None:
        _check_epochs(stream, train.global_batch, train.epochs)
    return StreamPlan.create(stream, train.global_batch, train.steps, train.epochs)


def source_facts(source: Source) -> dict[str, Any]:
    """Facts about the rows, as JSON."""
    facts: dict[str, Any] = {"rows": len(source)}
    if isinstance(source, Joined):
        facts["sources"] = {name: len(one) for name, one in source.sources.items()}
    if fingerprint := getattr(source, "fingerprint", None):
        facts["fingerprint"] = fingerprint
    return facts


def source_files(source: Source) -> dict[str, list[dict[str, Any]]]:
    """The files of each source with a `manifest`, so that a changed file can be named."""
    manifests = {name: getattr(one, "manifest", None) for name, one in sources_of(source).items()}
    return {name: list(m["files"]) for name, m in manifests.items() if isinstance(m, Mapping) and "files" in m}


@runtime_checkable
class CheckableSource(Protocol):
    """A source that can check its files for changes."""

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if a file has changed since it was opened; checks every `shares`-th file from number `share` on.

        Raises:
            DataError: naming a changed file.
        """


def checkable_sources(source: Source) -> list[CheckableSource]:
    """The sources whose files can be checked during training."""
    return [one for one in sources_of(source).values() if isinstance(one, CheckableSource)]


def _length_groups(task: Task, source: Source, config: RunConfig) -> LengthGroups | None:
    size = config.data.group_by_length
    if size is None:
        return None
    balanced, name = size == "balanced", type(task).__name__
    if balanced and config.layout.engine == "jax":
        raise ConfigError(
            "data.group_by_length=balanced gives each micro-batch a number of rows of its own, and a program of "
            "layout.engine=jax has one; set the rows of a group, as in data.group_by_length=4"
        )
    if balanced and resolve_features(task).recurrent is not None:
        raise ConfigError(
            f"data.group_by_length=balanced moves rows to other micro-batches in every step, and {name} keeps a state "
            "of the rows of each; leave it out"
        )
    lengths = getattr(source, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"data.group_by_length={size} needs the length of each row, and the source that {name}"
            ".data() returns has no `lengths`; leave it out, or give the source that attribute, (rows,) int64"
        )
    return LengthGroups(np.asarray(lengths, dtype=np.int64), None if size == "balanced" else size)


def _steps_of_tokens(task: Task, source: Source, config: RunConfig) -> int:
    """The updates that `train.tokens` take.

    Packed rows count as full. Others have the mean length of the source; of a mixture, that of its first rows.
    """
    data, train = config.data, config.train
    assert train.tokens is not None
    if data.packing is not None:
        per_row = float(data.packing.length or packed_capacity(task) or 0)
    else:
        lengths = getattr(source, "lengths", None)
        if lengths is None:
            raise ConfigError(
                f"train.tokens={train.tokens:g} needs to know how long rows are, but the source that "
                f"{type(task).__name__}.data() returns has no `lengths`; give the source that attribute, (rows,) "
                "int64, or set train.steps and train.tokens=null"
            )
        if data.mixture is not None:
            stream = _build_stream(task, source, config, SINGLE_LANE)
            lengths = lengths[stream.locate(np.arange(_ROWS_MEASURED))[0]]
        per_row = float(np.mean(lengths))
    if not per_row:
        raise ConfigError(f"train.tokens={train.tokens:g}: the rows are empty; set train.steps and train.tokens=null")
    return max(1, math.ceil(train.tokens / (per_row * train.global_batch)))


def _build_stream(task: Task, source: Source, config: RunConfig, lanes: Lanes) -> Stream:
    """The stream of rows, read by these lanes independently."""
    data, seed = config.data, config.run.seed

    def build_order(one: Any, seed: int) -> Stream:
        if data.shuffle == "blocks":
            return BlockOrder(one.blocks, seed, data.window, lanes)
        return Order(len(one), seed, shuffle=data.shuffle == "full")

    if data.mixture is None:
        return build_order(source, seed)
    assert isinstance(source, Joined)
    streams = [build_order(one, key(seed, "source", name)) for name, one in source.sources.items()]
    batch = config.train.global_batch
    if data.mixture.grouped:
        whole_weights(data.mixture, source.sources)
        shares = tuple(rows_of_sources(config, batch))
        return GroupedOrder(tuple(streams), tuple(source.starts), shares, seed, data.mixture.until)
    units = None
    if data.packing is not None and (room := data.packing.length or packed_capacity(task)):
        units = room * batch
    return MixtureOrder.from_config(data.mixture, source, streams, seed, batch, lanes, units)


def _check_rows(source: Any, name: str) -> None:
    by_number = hasattr(source, "__getitem__") or hasattr(source, "read_block")
    if not (hasattr(source, "__len__") and by_number):
        raise DataError(
            f"{name} returned a {type(source).__name__}, whose rows cannot be accessed by index. Give it __len__ and "
            "__getitem__ (a map-style Dataset), or return a list of rows."
        )
    if len(source) == 0:
        raise DataError(f"{name} has no rows")
    blocks = getattr(source, "blocks", None)
    if blocks is not None and int(np.sum(blocks)) != len(source):
        raise DataError(f"{name} has {len(source)} rows, but its blocks have {int(np.sum(blocks))}")


def _max_blocks(sources: Mapping[str, Any]) -> int:
    """The largest number of blocks of any source."""
    for name, one in sources.items():
        if getattr(one, "blocks", None) is None:
            raise ConfigError(
                f"data.shuffle=blocks needs sources with `blocks`, but {name or 'this one'} ({type(one).__name__}) has "
                "none; use data.shuffle=full"
            )
    return max(len(one.blocks) for one in sources.values())


def _check_epochs(stream: Stream, global_batch: int, epochs: float) -> None:
    """Reject epochs that lanes do not finish together; suggests the nearest number of steps."""
    steps, rest = divmod(round(epochs * stream.size), global_batch)
    if isinstance(stream, BlockOrder) and not rest and stream.lanes_end_together(epochs, steps * stream.lanes.stretch):
        return
    raise ConfigError(
        f"train.epochs={epochs:g} with data.shuffle=blocks: the blocks of {stream.size} rows do not divide evenly "
        "among the lanes, so some rows would be seen once more than others; set the number of steps instead: "
        f"train.steps={steps + (rest > 0)} train.epochs=null"
    )
