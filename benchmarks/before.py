"""How fast an earlier commit was: the same work under its code and under that of this checkout, in one run.

    python -m benchmarks.before COMMIT [--rounds 5] [--write]

The commit is checked out into a temporary folder. Each round runs every piece of work three times, in processes of
their own and in turn: under the earlier code, under this one, and under the earlier one again, which shows by how much
two runs of the same code differ. What they do is `before_work.py` of this checkout, with names that both commits
export. Runs lie in memory (`/dev/shm`, where there is one), so that no disk is measured. Figures are medians, ratios
those of the medians; above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import page

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")
ROWS = 40_000
SMALL_GROUP, GROUP = 20, 2_000  # rows in a row group of Parquet; 20 of them are some 1.2 kB
PIECES = ("rows", "steps", "save", "resume")  # of before_work.py, which goes on in `resume` from what `save` left


def write_rows(folder: Path) -> None:
    """The same rows as Parquet, twice, and JSON Lines; rows of numbers as NumPy."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    tokens = [rng.integers(50_000, size=16, dtype=np.uint16) for _ in range(ROWS)]
    texts = [f"row {number} of a table of small rows" for number in range(ROWS)]
    table = pa.table({"id": range(ROWS), "text": texts, "tokens": pa.array(tokens, pa.list_(pa.uint16()))})
    pq.write_table(table, folder / "small.parquet", row_group_size=SMALL_GROUP)
    pq.write_table(table, folder / "usual.parquet", row_group_size=GROUP)
    with (folder / "rows.jsonl").open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
    np.save(folder / "rows.npy", rng.integers(50_000, size=(ROWS, 64), dtype=np.uint16))


@contextmanager
def checkout_commit(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def sources_of(tree: Path) -> str:
    """Where Python finds the packages of a checkout, from before and since they were split, as PYTHONPATH."""
    return os.pathsep.join(map(str, [*tree.glob("src"), *tree.glob("packages/*/src"), *tree.glob("recipes/*/src")]))


def measure(tree: Path, piece: str, rows: Path, runs: Path) -> dict[str, float]:
    """What one process under the code of a tree finds."""
    variables = {
        **os.environ,
        "PYTHONPATH": sources_of(tree),
        "OMP_NUM_THREADS": "1",
        "UNISONO_CACHE": str(runs / "cache"),
    }
    variables["XDG_STATE_HOME"] = str(runs)  # the key that marks the user's own runs
    work = Path(__file__).with_name("before_work.py")
    words = [sys.executable, "-P", work, piece, rows if piece == "rows" else runs, repr(time.time())]
    done = subprocess.run(list(map(str, words)), cwd=runs, env=variables, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not found:
        raise SystemExit(f"{piece} failed under {tree}:\n{done.stdout}\n{done.stderr}")
    return dict(json.loads(found[0].removeprefix("FOUND ")))


def table(results: dict[str, dict[str, list[float]]]) -> list[str]:
    """The lines of the page: medians of before and now, their ratio, and that of before with itself."""
    lines = ["| | before | now | now / before | before again / before |", "|---|---|---|---|---|"]
    for title in results["before"]:
        before, now, again = (statistics.median(results[kind][title]) for kind in ("before", "now", "again"))
        lines.append(f"| {title} | {before:.3g} | {now:.3g} | {now / before:.3f} | {again / before:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    arguments = parser.parse_args()
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    results: dict[str, dict[str, list[float]]] = {kind: {} for kind in ("before", "now", "again")}
    loads = []
    with checkout_commit(arguments.commit) as old, tempfile.TemporaryDirectory(dir=memory) as name:
        rows = Path(name) / "rows"
        rows.mkdir()
        write_rows(rows)
        for tree in (old, ROOT):
            subprocess.run([sys.executable, "-m", "compileall", "-q", *sources_of(tree).split(os.pathsep)], check=True)
        for number in range(arguments.rounds):
            kinds = {"before": old, "now": ROOT, "again": old}
            for piece in PIECES:
                for kind in list(kinds)[number % 3 :] + list(kinds)[: number % 3]:
                    runs = Path(name) / f"{kind}-{number}"
                    runs.mkdir(exist_ok=True)
                    for title, value in measure(kinds[kind], piece, rows, runs).items():
                        results[kind].setdefault(title, []).append(value)
            loads.append(os.getloadavg()[0])
            print(f"round {number + 1} of {arguments.rounds}, load {loads[-1]:.1f}", flush=True)
        short = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "--short=8", arguments.commit], capture_output=True, text=True, check=True
        ).stdout.strip()
    about = (
        f"Medians of {arguments.rounds} rounds beside {short}, load {statistics.median(loads):.1f}, of which "
        f"what is measured is 1; {platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}."
    )
    text = "\n".join([*table(results), "", about])
    print(f"\n{text}")
    if arguments.write:
        page.put("before", text)


if __name__ == "__main__":
    main()
