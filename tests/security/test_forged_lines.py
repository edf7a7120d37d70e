"""Names in somebody else's data forge no line of ours, wherever a message quotes them."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono import open_source
from unisono.observe import logs
from unisono.runtime.errors import CheckpointError, DataError, SaveError

FORGED = "a\nunisono: the run has finished\r\x1b[2J"


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "name"])
@pytest.mark.parametrize("asked", [{"columns": ["b"]}, {"expect": {"b": "int64"}}])
def test_the_name_of_a_column_or_a_file_stays_in_its_line(
    tmp_path: Path, ending: str, asked: Mapping[str, object]
) -> None:
    path = tmp_path / (f"{FORGED}.csv" if ending == "name" else f"a.{ending}")
    if ending == "jsonl":
        path.write_text(json.dumps({FORGED: 1}))
    elif ending == "parquet":
        pq.write_table(pa.table({FORGED: [1]}), path)
    else:
        path.write_text(f'"{FORGED}",c\nx,1\n')
    with pytest.raises(DataError) as caught:
        open_source(path, **asked)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    assert "\\x0aunisono" in str(caught.value)


@pytest.mark.parametrize("kind", [DataError, CheckpointError, SaveError])
def test_errors_about_what_others_wrote_are_one_line(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind(f"column {FORGED}")))
    assert len(str(error).splitlines()) == 1
    assert str(kind("as it is, 2 × 3\n")) == "as it is, 2 × 3"


def test_a_line_break_in_a_log_begins_no_entry() -> None:
    record = logging.LogRecord("a", logging.WARNING, "", 0, "%s is new", (FORGED,), None)
    text = logs._MaskingFormatter("WARNING: %(message)s").format(record)
    assert [line[:3] for line in text.split("\n")] == ["WAR", "  u"]
