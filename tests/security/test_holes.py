"""Files of 40 GB that are holes but for their beginning, as a download that was never written, are refused.

They take no space, and nothing that is said about them is true, so no reader may hold what their size or their one line
seems to ask for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SIZE = 40 << 30
_MEMORY = 3500  # MB: the limits of safe_paths for a whole file (2 GiB), and libraries

READ = {
    "a.csv": (b"a,b\n1,2\n", "from unisono import open_source; open_source(path)"),
    "a.tsv": (b"", "from unisono import open_source; open_source(path)"),
    "a.txt": (b"one", "from unisono import open_source; open_source(path)[0]"),
    "parts.txt": (b"one|two|", "from unisono import open_source; open_source(path, separator='|')[0]"),
    "streamed.txt": (
        b"one|two|",
        "from unisono.data.sources import File, records, ColumnRequest\n"
        "for _ in records(File.from_path(path, 'text', 'a'), ColumnRequest(separator='|')): pass",
    ),
    "rows.npy": (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 5000000000), }".ljust(117)
        + b"\n",
        "from unisono import open_source; open_source(path)[0]",
    ),
    "metadata.tsv": (b"id\tage\n", "from unisono.data.table_files import read_table; read_table(path)"),
    "sequences.fasta": (b">a\nACGT\n", "from unisono_microbiome.study.sequences import read_fasta; read_fasta(path)"),
    "table.biom": (b"{", "from unisono_microbiome.study.table import read_table; read_table(path)"),
    "tree.nwk": (b"((a:1,b:1):1,", "from unisono_microbiome.study.tree import Tree; Tree(path).root"),
    "sudoku.csv": (b"q,a\n", "from unisono_puzzles.data.tables import read_puzzles; read_puzzles(path)"),
    "conversations.jsonl": (b"{", "from unisono import open_source; open_source(path)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_file_of_holes_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path, (beginning, code) = tmp_path / name, READ[name]
    path.write_bytes(beginning)
    os.truncate(path, _SIZE)
    script = f"""
import resource, sys
from pathlib import Path
path = Path(sys.argv[1])
try:
{chr(10).join("    " + line for line in code.splitlines())}
except ValueError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, timeout=240
    )
    peak, said = done.stdout.split(" ", 1)
    assert name in said
    assert int(peak) < _MEMORY
