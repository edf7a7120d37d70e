"""Recordings behind a URL are those of local files, read with the options of their store, within a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import unisono_audio as audio
from packages.unisono.tests.data.sources.servers import Server, serving
from unisono.runtime.errors import DataError
from unisono.runtime.remote import RemoteOptions
from unisono_audio.sources import open_recordings

from .written import encoded, table, write


class _Store(MemoryFileSystem):  # type: ignore[misc]
    """A store that answers only to those who give its region."""

    protocol = "guarded"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent's

    def __init__(self, region: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if region != "north":
            raise PermissionError("no region")


@pytest.fixture(autouse=True)
def _registered() -> None:
    fsspec.register_implementation("guarded", _Store, clobber=True)


def test_an_archive_behind_a_url_gives_what_a_local_one_gives(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "tar", "tar"))
    local = open_recordings(path)
    with serving(path.parent) as server:
        remote = open_recordings(f"{server.url}/{path.name}")
        assert len(remote) == len(local) > 2
        assert (remote.remote, local.remote) == (True, False)
        assert remote.table.fingerprint == local.table.fingerprint
        for row in (0, 1):
            expected, found = local[row], remote[row]
            assert found["cls" if "cls" in found else "key"] == expected["cls" if "cls" in expected else "key"]
            samples = audio.decode(found["audio"]).samples
            assert samples.std() > 0.01
            assert (samples == audio.decode(expected["audio"]).samples).all()


def test_the_options_of_a_store_are_used_for_recordings_too(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "tar", "tar"))
    with fsspec.open("guarded://box/a.tar", "wb", region="north") as file:
        file.write(path.read_bytes())
    with pytest.raises(DataError, match="no region"):
        open_recordings("guarded://box/a.tar")
    recordings = open_recordings("guarded://box/a.tar", storage={"region": "north"})
    assert (audio.decode(recordings[0]["audio"]).samples == audio.decode(encoded()[0]).samples).all()


def test_a_url_within_a_table_is_read_with_the_options_of_the_table(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open("guarded://box/a.flac", "wb", region="north") as file:
        file.write(encoded()[0])
    struct = pa.array([{"bytes": None, "path": "guarded://box/a.flac"}], table().schema.field("audio").type)
    pq.write_table(pa.table({"audio": struct}), tmp_path / "a.parquet")
    recordings = open_recordings(tmp_path / "a.parquet", storage={"region": "north"})
    assert (audio.decode(recordings[0]["audio"]).samples == audio.decode(encoded()[0]).samples).all()
    with pytest.raises(DataError, match=r"guarded://box/a\.flac cannot be read: .*no region"):
        audio.decode(open_recordings(tmp_path / "a.parquet")[0]["audio"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, audio.ByteRange]]:
    """A server of an archive, and the first recording in it."""
    path = Path(write(tmp_path / "tar", "tar"))
    with serving(path.parent) as server:
        yield server, open_recordings(f"{server.url}/{path.name}")[0]["audio"]


def test_a_server_that_never_answers_is_an_error(served: tuple[Server, audio.ByteRange]) -> None:
    server, part = served
    server.mode = "silent"
    hurried = RemoteOptions(deadline=0.5)
    for source in (replace(part, where=hurried), audio.ByteRange(part.url, 0, -1, hurried)):
        with pytest.raises(DataError, match=r"no answer within 0\.5 s; check the server"):
            audio.decode(source)


def test_an_archive_cut_off_behind_its_server_is_an_error(served: tuple[Server, audio.ByteRange]) -> None:
    server, part = served
    server.mode = "half"
    with pytest.raises(DataError, match=r"http://.*\.tar"):
        audio.decode(part)
