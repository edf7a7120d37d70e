"""Finds the largest micro-batch that fits the memory of every process (`layout.micro_batch=auto`, `unisono autobatch`).

The global batch stays the same, so results do not change unless random numbers are drawn per micro-batch; only the
number of passes does. Sizes are measured by separate processes, laid out like the run's, which can run out of memory
without harm. Measurements are cached per model, data, layout, versions and device.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unisono.config import CONFIG_FILE, environment, fingerprint
from unisono.config.batch_split import divisors
from unisono.config.code import code_digest, references
from unisono.config.schema.run import RunConfig
from unisono.engines.torch import devices
from unisono.launch.autobatch import memory, memory_fit
from unisono.launch.processes import local_processes
from unisono.launch.resolving import layout
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.display.preparing import preparing
from unisono.runtime.errors import ConfigError
from unisono.runtime.files import cache_dir, check_private, make_cache_folder, write_whole

# Files by which the processes of a search communicate.
REQUEST_FILE, RESULT_FILE, CURRENT_SIZE_FILE = "request.json", "result.json", "current-size.json"
_MAX_STARTS = 6  # attempts, each of which may end because a process runs out of memory


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        micro_batch: Rows per micro-batch.
        rows: Rows of a global batch per process.
        fits: Rows that would fit, whether or not they divide `rows`; infinite if rows take no memory.
        limit: Bytes per process.
        source: What sets the limit.
        kind: What is counted.
        peaks: Peak bytes by micro-batch size, as far as measured.
        from_cache: Whether nothing had to be measured.
    """

    micro_batch: int
    rows: int
    fits: float
    limit: int
    source: str
    kind: str
    peaks: dict[int, int] = field(default_factory=dict)
    from_cache: bool = False

    def lines(self) -> list[str]:
        """Format the result for the console."""
        more = f"; about {self.fits:.0f} would fit" if self.fits < self.rows else ""
        passes = self.rows // self.micro_batch
        return [
            f"micro-batch {self.micro_batch} of {self.rows} rows per process, in {passes} pass{'es' * (passes != 1)}"
            f"{more}",
            f"  limit: {self.limit / 1e9:.3f} GB, {self.source}; {memory_fit.MARGIN:.0%} of it is kept free",
            *(
                f"  {size} row{'s' * (size != 1)}: {peak / 1e9:.3f} GB ({self.kind})"
                for size, peak in sorted(self.peaks.items())
            ),
            *(["  measured by an earlier start"] if self.from_cache else []),
        ]


def find_micro_batch(config: RunConfig, processes: bool = True) -> SearchResult:
    """Find the largest micro-batch that fits all processes, by measurement or from the cache.

    Args:
        config: Concrete except for the micro-batch.
        processes: Whether processes may be started here to measure.

    Raises:
        ConfigError: If not even one row fits, or if nothing is cached and nothing can be measured.
    """
    assert isinstance(config.layout.world_size, int)
    if config.train.global_batch % config.layout.world_size:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} cannot be split evenly over layout.world_size="
            f"{config.layout.world_size} processes"
        )
    rows = config.train.global_batch // config.layout.world_size
    kept = cache_dir() / "autobatch" / f"{_cache_key(config)}.json"
    check_private(kept)
    known = _read_json(kept)
    if known and (found := _choose_size(known, rows, _current_limit(config, known), known=True)):
        return found
    if not processes:
        raise ConfigError(
            "layout.micro_batch=auto measures with processes of its own, which it can start only on a single host and "
            "without a launcher. Run `unisono autobatch` with the same settings there, and set layout.micro_batch to "
            "the number that it finds"
        )
    measured = _measure(config, divisors(rows), known)
    if measured["peaks"]:
        make_cache_folder(kept.parent)
        write_whole(kept, json.dumps(measured))
    found = _choose_size(measured, rows, (measured["limit"], measured["source"]))
    if found is None:
        least = min(map(int, measured["peaks"]), default=0)
        size_text = f"takes {measured['peaks'][str(least)] / 1e9:.3f} GB" if least else "ran out of memory"
        raise ConfigError(
            f"a micro-batch of one row {size_text}, but a process may use {measured['limit'] / 1e9:.3f} GB "
            f"({measured['source']}); use layout.strategy=fsdp, layout.activation_checkpointing=1, or a smaller model"
        )
    return found


def _measure(config: RunConfig, sizes: list[int], known: dict[str, Any]) -> dict[str, Any]:
    """Measure in separate processes; if one runs out of memory, start again without that size."""
    assert isinstance(config.layout.world_size, int)
    found: dict[str, Any] = {"peaks": {}, "kind": "", "limit": 0, "source": "", "failed": None, **known}
    with tempfile.TemporaryDirectory(prefix="unisono-autobatch-") as name:
        path = Path(name)
        values = {**fingerprint.to_json(config), "recipe": references.absolute_reference(config.recipe)}
        (path / CONFIG_FILE).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        for start in range(_MAX_STARTS):
            request = {"sizes": sizes, **{name: found[name] for name in ("peaks", "kind", "failed")}}
            (path / REQUEST_FILE).write_text(json.dumps(request), encoding="utf-8")
            (path / CURRENT_SIZE_FILE).unlink(missing_ok=True)
            try:
                threads = layout.threads_per_process(config.layout.world_size)
                with preparing("measuring micro-batches", shown=config.observe.progress is True):  # minutes on a CPU
                    local_processes.launch(
                        config, path, threads, module="unisono.launch.autobatch.probe", arguments=(config.recipe,)
                    )
            except local_processes.WorkerError as error:
                tried = _read_json(path / CURRENT_SIZE_FILE)
                if not isinstance(tried, int) or not error.memory or start == _MAX_STARTS - 1:
                    raise
                found = {**found, **_read_json(path / RESULT_FILE), "failed": tried}
            else:
                return {**found, **_read_json(path / RESULT_FILE)}
    raise AssertionError


def _choose_size(
    measured: dict[str, Any], rows: int, limit: tuple[int, str] | None, known: bool = False
) -> SearchResult | None:
    """Return the result that the measurements imply; None if they do not suffice."""
    peaks = {int(size): peak for size, peak in measured["peaks"].items()}
    if limit is None or not peaks:
        return None
    room = memory_fit.usable_bytes(limit[0])
    failed = measured["failed"] or float("inf")
    if known and memory_fit.next_size(divisors(rows), peaks, room, failed) is not None:
        return None
    size = memory_fit.largest_fitting(peaks, room)
    if size is None:
        return None
    fits = memory_fit.MemoryLine.fit(peaks).rows(room)
    return SearchResult(size, rows, fits, *limit, measured["kind"], peaks, known)


def _current_limit(config: RunConfig, known: dict[str, Any]) -> tuple[int, str] | None:
    """Return the limit of a process if it can be known here: on the CPU, or as cached for the same kind of device."""
    if config.layout.device != "cpu":
        given = config.layout.max_memory_gb
        return (int(given * 1e9), "layout.max_memory_gb") if given else (known["limit"], known["source"])
    limit = memory.memory_limit(config, "cpu", int(config.layout.world_size))
    return (limit.amount, limit.source) if limit.kind == known["kind"] else None


def _cache_key(config: RunConfig) -> str:
    layout = {**fingerprint.to_json(config)["layout"], "micro_batch": None, "max_memory_gb": None}
    parts = {
        "mathematics": fingerprint.config_digest(config),
        "layout": layout,
        "code": code_digest.digest_sources(config.recipe, config.layout.engine),
        "versions": environment.library_versions(),
        "device": devices.product(config.layout.device),
        "cores": usable_cores(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
