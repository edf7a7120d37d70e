"""Peak memory of reading a large BIOM table: as the microbiome recipe does, in memory or mapped, and by biom-format.

    python -m benchmarks.biom_memory [--entries 20000000]

A process each; its peak above what it has after its imports, in bytes per entry. The table itself takes 12 in memory.
The peak is of memory that the process cannot give back (anonymous), since pages of a mapped file are dropped where
memory is short. `mapped` also reads every row once, in a random order, and `again` finds the file written.
`limited` does so with that memory limited to 200 MB above its imports (`RLIMIT_DATA`), in which the table in memory
does not fit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

_READ = """
import re, resource, sys, threading, time
from pathlib import Path
import biom, h5py, numpy as np, scipy.sparse
from unisono_microbiome.study.storage import Storage
from unisono_microbiome.study.table import read_table
who, path, entries, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before, peak, done = status("RssAnon"), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, status("RssAnon"))
watching = threading.Thread(target=watch)
watching.start()
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)
start = time.perf_counter()
try:
    if who == "biom-format":
        biom.load_table(str(path))
    else:
        counts = read_table(path, Storage("memory" in who, path.parent / "cache")).counts
        rows = np.random.default_rng(0).permutation(counts.shape[0])
        total = sum(int(counts.data[counts.indptr[row] : counts.indptr[row + 1]].sum()) for row in rows)
        assert total == entries
    ended = f"{(peak - before) / entries:.1f} bytes per entry ({(peak - before) / 1e6:.0f} MB)"
except Exception as error:
    ended = f"refused: {type(error).__name__}: {error}"[:160]
done.set()
print(f"{who}: {ended}, {time.perf_counter() - start:.1f} s", flush=True)
"""
_LIMIT = 200_000_000  # bytes


def write(path: Path, entries: int) -> None:
    """A table of samples with 500 taxa each."""
    rows, taxa = entries // 500, 10_000
    columns = np.concatenate([np.arange(500, dtype=np.int32) * 20 + row % 20 for row in range(rows)])
    with h5py.File(path, "w") as file:
        file.attrs.update({"id": "None", "type": "OTU table", "format-url": "", "format-version": (2, 1),
                           "generated-by": "", "creation-date": "2026-01-01", "shape": (taxa, rows),
                           "nnz": len(columns)})  # fmt: skip
        for axis, ids in (("sample", rows), ("observation", taxa)):
            file[f"{axis}/ids"] = [f"{axis[0]}{number}" for number in range(ids)]
            file.create_group(f"{axis}/metadata")
            file.create_group(f"{axis}/group-metadata")
        file["sample/matrix/indptr"] = np.arange(rows + 1, dtype=np.int32) * 500
        file["sample/matrix/indices"] = columns
        file["sample/matrix/data"] = np.ones(len(columns))
        order = np.argsort(columns, kind="stable").astype(np.int32)
        file["observation/matrix/indptr"] = np.searchsorted(columns[order], np.arange(taxa + 1)).astype(np.int32)
        file["observation/matrix/indices"] = order // 500
        file["observation/matrix/data"] = np.ones(len(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=20_000_000)
    entries = parser.parse_args().entries
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "table.biom"
        # By a process of its own, since those that read begin with the peak of their parent.
        writing = multiprocessing.get_context("spawn").Process(target=write, args=(path, entries))
        writing.start()
        writing.join()
        for who, limit in (
            ("memory", 0), ("mapped", 0), ("mapped again", 0), ("memory, limited", _LIMIT), ("mapped, limited", _LIMIT),
            ("biom-format", 0),
        ):  # fmt: skip
            given = [who, str(path), str(entries // 500 * 500), str(limit)]
            subprocess.run([sys.executable, "-c", _READ, *given], check=True)
            if who == "mapped again":
                shutil.rmtree(path.parent / "cache")


if __name__ == "__main__":
    main()
