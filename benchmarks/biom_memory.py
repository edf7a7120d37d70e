"""Peak memory of reading a large BIOM table: in blocks of rows, as the microbiome recipe does, and by biom-format.

    python -m benchmarks.biom_memory [--entries 20000000]

A process each; its peak above what it has after its imports, in bytes per entry. The table itself takes 12 in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

_READ = """
import resource, sys, time
from pathlib import Path
import biom, h5py, scipy.sparse
from unisono_microbiome.study.table import read_table
path, entries = Path(sys.argv[2]), int(sys.argv[3])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
found = read_table(path) if sys.argv[1] == "ours" else biom.load_table(str(path))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{sys.argv[1]}: {(peak - before) * 1024 / entries:.1f} bytes per entry, {time.perf_counter() - start:.1f} s")
"""


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
        for who in ("ours", "biom-format"):
            subprocess.run([sys.executable, "-c", _READ, who, str(path), str(entries // 500 * 500)], check=True)


if __name__ == "__main__":
    main()
