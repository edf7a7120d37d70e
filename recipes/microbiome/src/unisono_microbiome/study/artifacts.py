"""QIIME 2 artifacts (`.qza`): zip archives with one file of data, its type, and how it came to be.

Readers of other files read what is inside: `open_data` copies the one file that a setting needs to a private temporary
folder, after checking the archive. It comes from anybody, so no other member is unpacked, and none that its entry
declares larger than what the whole archive may be.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, UnisonoError, write_table
from unisono.recipe_tools import archives, atomic_file, format_examples, safe_paths, wrap_native_errors

SUFFIX = ".qza"
DATA: Mapping[str, Mapping[str, str]] = {
    "data.table": {"FeatureTable[Frequency]": "feature-table.biom"},
    "data.fasta": {"FeatureData[Sequence]": "dna-sequences.fasta"},
    "data.tree": {"Phylogeny[Rooted]": "tree.nwk", "Phylogeny[Unrooted]": "tree.nwk"},
    "data.taxonomy": {"FeatureData[Taxonomy]": "taxonomy.tsv"},
    "data.distances": {"DistanceMatrix": "distance-matrix.tsv"},
    "data.metadata": {"ImmutableMetadata": "metadata.tsv", "SampleData[AlphaDiversity]": "alpha-diversity.tsv"},
}
"""The types of artifacts that each setting can name, and the file in them that is read."""

_READ_BY_QIIME, _OTHER_TABLES = (".tsv", SUFFIX), (".csv", ".jsonl", ".parquet")
_VISUALIZATION = ".qzv"  # an archive of the same layout, which no setting can name
_ARCHIVE = "5"  # version of the archive's layout that is written: all releases since 2018.11 read it
_FRAMEWORK = "2018.11.0"  # the release that introduced it, as which it is written
_SMALL = 1 << 16  # bytes of VERSION and metadata.yaml


def is_artifact(path: Path) -> bool:
    """Whether a file's name says that it is an artifact."""
    return path.suffix.lower() == SUFFIX


def check_file(path: Path, key: str, what: str) -> None:
    """Refuse what is not a file, such as the folder that `qiime tools export` makes.

    Args:
        path: that the setting names.
        key: the setting, one of `DATA`.
        what: it should name, in words.
    """
    if path.is_dir():
        inside = next((name for name in DATA[key].values() if (path / name).is_file()), None)
        named = "a file in it" if inside is None else f"{path / inside}"
        raise DataError(f"{path} ({key}) is a folder: name {named}")
    if not path.is_file():
        raise DataError(f"{path} ({key}) does not exist; give {what}")


@contextmanager
def open_data(path: Path, key: str) -> Iterator[Path]:
    """The file of data in an artifact, in a temporary folder; any file that is not an artifact is itself.

    Args:
        path: that the setting names.
        key: the setting, one of `DATA`.

    Raises:
        DataError: for an archive that is not an artifact, or one of another type; errors that are raised while it is
            open, too, name the artifact instead of the temporary file.
    """
    if path.suffix.lower() not in (SUFFIX, _VISUALIZATION):
        yield path
        return
    shown = f"{path} ({key})"
    with tempfile.TemporaryDirectory(prefix="unisono-qza-") as folder:
        with wrap_native_errors(f"{shown} is not a readable QIIME 2 artifact"):
            found = _extract(path, shown, DATA[key], Path(folder))
        try:
            yield found
        except UnisonoError as error:
            raise type(error)(str(error).replace(str(found), f"{path}/data/{found.name}")) from error


def _extract(path: Path, shown: str, wanted: Mapping[str, str], folder: Path) -> Path:
    """Copy the file of data of an artifact of one of these types into a folder."""
    with safe_paths.open_regular(path) as opened, archives.open_archive(opened) as archive:
        members = {}
        for member in archive.infolist():
            safe_paths.components(path, member.filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{shown}: '{member.filename}' is a link, which artifacts do not have; do not trust it")
            if member.filename in members:
                raise DataError(f"{shown} has two files '{member.filename}'; it is damaged or forged")
            members[member.filename] = member
        roots = sorted({name.split("/")[0] for name in members if not name.startswith(".")})
        if len(roots) != 1 or f"{roots[0]}/VERSION" not in members:
            raise DataError(
                f"{shown} is not a QIIME 2 artifact: it should have one folder with a file VERSION, and has "
                f"{format_examples(roots) or 'nothing'}"
            )

        def read_small(name: str) -> str:
            member = members.get(f"{roots[0]}/{name}")
            if member is None or member.file_size > _SMALL:
                raise DataError(f"{shown} has {'no' if member is None else 'a huge'} {name}; it is damaged or forged")
            return archive.read(member).decode("utf-8")

        if not read_small("VERSION").startswith("QIIME 2"):
            raise DataError(f"{shown} is not a QIIME 2 artifact: its VERSION does not begin with 'QIIME 2'")
        described = _parse_flat_yaml(read_small("metadata.yaml"))
        kind = described.get("type", "").split(" % ")[0]  # without properties, which change no format
        if kind not in wanted:
            remedy = "; open it with `qiime tools view`" if kind == "Visualization" else ""
            raise DataError(
                f"{shown} is a QIIME 2 artifact of type {kind or 'unknown'}, but this setting needs "
                f"{' or '.join(wanted)}{remedy}"
            )
        data = members.get(f"{roots[0]}/data/{wanted[kind]}")
        if data is None:
            raise DataError(f"{shown} is of type {kind}, but has no data/{wanted[kind]}; it is damaged or forged")
        found = folder / wanted[kind]
        with archive.open(data) as source, found.open("xb") as made:
            first = source.read(1)
            # QIIME 2 names the columns of diversities, but not that of the ids.
            made.write(b"id\t" if first == b"\t" and wanted is DATA["data.metadata"] else first)
            shutil.copyfileobj(source, made, 1 << 20)
    return found


def check_suffix(path: Path) -> None:
    """Refuse a path of whose ending nothing is written, before what is to be written is computed."""
    if path.suffix not in (*_READ_BY_QIIME, *_OTHER_TABLES):
        raise ConfigError(
            f"{path}: nothing is written with this ending; choose {' or '.join(_READ_BY_QIIME)}, which QIIME 2 reads, "
            f"or {', '.join(_OTHER_TABLES)}"
        )


def write_metadata(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write a table that QIIME 2 reads as metadata, as `.tsv` or `.qza`; other endings as of `unisono.write_table`.

    Args:
        path: of it.
        columns: by name, the first of them with ids; a column of numbers is numeric, with NaN where there is none, all
            else categorical.
    """
    if path.suffix != ".tsv" and not is_artifact(path):
        return write_table(path, columns)
    types = ["#q2:types", *(_find_type(values) for values in list(columns.values())[1:])]
    typed = {
        name: [kind, *("" if value != value else value for value in np.asarray(values).tolist())]  # NaN as QIIME 2 does
        for kind, (name, values) in zip(types, columns.items(), strict=True)
    }
    return _write_tsv(path, typed, "ImmutableMetadata", "ImmutableMetadataDirectoryFormat", "metadata.tsv")


def write_distances(path: Path, ids: Sequence[str], distances: NDArray[np.float64]) -> Path:
    """Write a matrix of distances, (ids, ids), as a table with ids in the first line and column, or as `.qza`."""
    columns = {"": ids, **dict(zip(ids, distances.T, strict=True))}
    return _write_tsv(path, columns, "DistanceMatrix", "DistanceMatrixDirectoryFormat", "distance-matrix.tsv")


def _find_type(values: Sequence[Any]) -> str:
    return "numeric" if np.asarray(values).dtype.kind in "fiu" else "categorical"


def _write_tsv(path: Path, columns: Mapping[str, Any], kind: str, layout: str, name: str) -> Path:
    if not is_artifact(path):
        return write_table(path, columns)
    with tempfile.TemporaryDirectory(prefix="unisono-qza-") as folder:
        inner = write_table(Path(folder) / name, columns, escape=False)  # no spreadsheet opens it, and ids stay ids
        content = safe_paths.read_regular(inner)
    return write_artifact(path, kind, layout, {name: content})


def write_artifact(path: Path, kind: str, layout: str, files: Mapping[str, bytes]) -> Path:
    """Write an artifact as `qiime tools import` would, with an import as its provenance.

    Args:
        path: of it.
        kind: semantic type, e.g. `DistanceMatrix`.
        layout: QIIME's name of the directory's format, e.g. `DistanceMatrixDirectoryFormat`.
        files: content by name.
    """
    root, now = str(uuid.uuid4()), datetime.now(UTC).isoformat()
    heading = f"QIIME 2\narchive: {_ARCHIVE}\nframework: {_FRAMEWORK}\n".encode()
    described = f"uuid: {root}\ntype: {kind}\nformat: {layout}\n".encode()
    manifest = "".join(f"    -   name: {name}\n        md5sum: {_md5(content)}\n" for name, content in files.items())
    action = (
        f"execution:\n    uuid: {uuid.uuid4()}\n    runtime:\n        start: {now}\n        end: {now}\n"
        "        duration: 0 microseconds\n\n"
        f"action:\n    type: import\n    format: {layout}\n    manifest:\n{manifest}\n"
        "transformers:\n    output:\n"
        f"    -   from: {layout}\n        to: {layout}\n\n"
        f"environment:\n    platform: {platform.system().lower()}-{platform.machine()}\n"
        f"    python: {platform.python_version()}\n    framework:\n        version: {_FRAMEWORK}\n"
        "        website: https://qiime2.org\n        citations: []\n    plugins: {}\n    python-packages:\n"
        f"        unisono-microbiome: {version('unisono-microbiome')}\n"
    ).encode()
    content = {
        "VERSION": heading,
        "metadata.yaml": described,
        **{f"data/{name}": value for name, value in files.items()},
        "provenance/VERSION": heading,
        "provenance/metadata.yaml": described,
        "provenance/citations.bib": b"",
        "provenance/action/action.yaml": action,
    }
    content["checksums.md5"] = "".join(f"{_md5(value)}  {name}\n" for name, value in content.items()).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, ZipFile(temporary, "w") as archive:
        for name, value in content.items():
            entry = ZipInfo(f"{root}/{name}", datetime.now(UTC).timetuple()[:6])
            entry.compress_type, entry.external_attr = ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, value)
    return path


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _parse_flat_yaml(text: str) -> dict[str, str]:
    """The `key: value` lines of an artifact's metadata.yaml, all of which are plain texts."""
    pairs = (line.partition(":") for line in text.splitlines() if line.strip() and not line[0].isspace())
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}
