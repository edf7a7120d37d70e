"""Which files of a run, besides checkpoints, are uploaded to and restored from a store.

Events and ledger grow with the run and stay local. A store may be untrusted, so names must be on an allowlist: records
of the run, and assets with a data file's extension. None of them is ever imported, and none becomes executable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from unisono.config import CONFIG_FILE

RECORDS = (CONFIG_FILE, "config.[0-9]*.yaml", "fingerprint.json", "files.json", "trackers.json", "certificate.json")
ASSETS = "assets"
_RECORD = re.compile(r"config(\.[0-9]{4,8})?\.yaml|(fingerprint|files|trackers|certificate)\.json")
_PATH_PART = re.compile(
    r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,199}"
)  # not hidden, no separators, no control characters
_DATA_ENDINGS = frozenset({
    "", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".txt", ".md", ".csv", ".tsv", ".jinja",
    ".model", ".vocab", ".bpe", ".tiktoken", ".npy", ".npz", ".safetensors", ".parquet",
    ".arrow", ".h5", ".hdf5", ".biom",
    ".nwk", ".tree", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".wav", ".flac", ".ogg", ".gz",
})  # fmt: skip


def is_known(name: str) -> bool:
    """Whether a file of this name, relative to the run's folder, is uploaded and restored.

    >>> [is_known(name) for name in ("config.yaml", "assets/tokenizer.json", "assets/evil.py", "assets/../config.yaml")]
    [True, True, False, False]
    """
    first, _, inner = name.partition("/")
    if not inner:
        return _RECORD.fullmatch(name) is not None
    parts = inner.split("/")
    return (
        first == ASSETS
        and len(parts) <= 8
        and all(_PATH_PART.fullmatch(part) for part in parts)
        and PurePosixPath(inner).suffix.lower() in _DATA_ENDINGS
    )


def is_elsewhere(name: str) -> bool:
    """Whether a name points outside its folder, on this or another system."""
    return name.startswith(("/", "\\", "~")) or ".." in re.split(r"[/\\]", name) or "\0" in name or ":" in name


def files(folder: Path) -> dict[str, Path]:
    """The files of a run to upload, by name; links are skipped."""
    return {name: path for name, path in _iterate_files(folder) if is_known(name)}


def find_skipped_assets(folder: Path) -> list[str]:
    """Names of a run's assets that are not uploaded, because of their extension."""
    return [name for name, _ in _iterate_files(folder) if not is_known(name)]


def _iterate_files(folder: Path) -> Iterator[tuple[str, Path]]:
    records = [path for pattern in RECORDS for path in sorted(folder.glob(pattern))]
    for path in [*records, *sorted((folder / ASSETS).rglob("*"))]:
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(folder).as_posix(), path
