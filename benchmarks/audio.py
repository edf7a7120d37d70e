"""Recordings to normalised features: samples a second of Unisono and its peers, stages, and workers against memory.

    python -m benchmarks.audio [--loaders] [--stages] [--workers] [--crops] [--scans] [--rounds 3] [--write]

Every loader runs in a process of its own, in turn, round after round, so that what else a machine does meets all alike.
A window in which others used more than a tenth of the cores is marked, and left out of the medians where enough others
are left. CPU is that of the process and its children; memory the sum of their proportional set sizes (PSS).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks import audio_loaders, page
from benchmarks.audio_loaders import BATCH, LOADERS, NEEDS, SETS

_HEADS = {
    "loaders": "Loaders",
    "workers": "Workers and memory",
    "stages": "Stages",
    "crops": "Windows of long recordings",
    "scans": "Scans",
}
_QUIET = 0.10  # of the cores, that others may use


def busy() -> float:
    """CPU seconds of the whole machine since it started."""
    values = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(values[:8]) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> tuple[float, float]:
    """CPU seconds and MB of a process and all below it."""
    import psutil

    seconds, memory = 0.0, 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            seconds += (
                times.user + times.system + times.children_user + times.children_system
            )  # also of those that ended
            memory += process.memory_full_info().pss / 1e6
        except (psutil.Error, FileNotFoundError):
            continue
    return seconds, memory


def window(name: str, folder: Path, kind: str, seconds: float, workers: int | None = None) -> dict[str, float]:
    """Throughput of a loader in this process, after its first batches."""
    batches = LOADERS[name](folder, kind) if workers is None else audio_loaders.unisono(folder, kind, workers)
    for _ in range(6):
        batch = next(batches)
    assert batch.shape[0] == BATCH
    cpu, others, began, count = tree(os.getpid())[0], busy(), perf_counter(), 0
    while perf_counter() - began < seconds or count < 4:
        next(batches)
        count += BATCH
    wall = perf_counter() - began
    own, memory = tree(os.getpid())
    own -= cpu
    foreign = max(0.0, busy() - others - own) / (wall * (os.cpu_count() or 1))
    return {"rate": count / wall, "cpu": 1e3 * own / count, "memory": memory, "foreign": foreign}


def measured(name: str, folder: Path, kind: str, seconds: float, workers: int | None = None) -> dict[str, float] | None:
    """A window in a process of its own; None where the loader cannot run."""
    words = [name, str(folder), kind, str(seconds), str(workers or "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.audio", "--window", *words], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{name}: {done.stderr.strip().splitlines()[-1:] or done.returncode}", file=sys.stderr)
        return None
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def middle(windows: list[dict[str, float]]) -> dict[str, float]:
    """Medians, of quiet windows where there are at least two."""
    quiet = [window for window in windows if window["foreign"] <= _QUIET]
    used = quiet if len(quiet) >= 2 else windows
    return {
        **{key: median(window[key] for window in used) for key in ("rate", "memory", "foreign")},
        "cpu": min(window["cpu"] for window in windows), "quiet": len(quiet), "windows": len(windows),
    }  # fmt: skip


def loaders(folder: Path, rounds: int, seconds: float, only: list[str]) -> str:
    """The table of loaders."""
    results: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    names = [
        n
        for n in LOADERS
        if (not only or n in only)
        and find_spec(NEEDS.get(n, n.lower().partition(" ")[0].replace("decoding", "unisono").replace(",", "")))
        is not None
    ]
    for _ in range(rounds):
        for kind in SETS:
            for name in names:
                if (one := measured(name, folder, kind, seconds)) is not None:
                    results[name][kind].append(one)
                    print(f"{kind} {name}: {one}", file=sys.stderr, flush=True)
    head = "| loader | " + " | ".join(
        f"{k.upper()} {SETS[k][0] / 1000:g} kHz samples/s | CPU ms/sample | MB" for k in SETS
    )
    lines = [head + " |", "|---|" + "---|" * 3 * len(SETS)]
    middles = {name: {kind: middle(w) for kind, w in kinds.items()} for name, kinds in results.items()}
    for name in names:
        cells = []
        for kind in SETS:
            run = middles.get(name, {}).get(kind)
            cells.append(
                f"{run['rate']:.0f}{'' if run['quiet'] >= 2 else ' †'} | {run['cpu']:.2f} | {run['memory']:.0f}"
                if run
                else "- | - | -"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for kind in SETS:
        peers = {n: m[kind] for n, m in middles.items() if kind in m and not n.startswith(("Unisono", "decoding"))}
        if not peers or "Unisono" not in middles:
            continue
        for ours in ("Unisono", "Unisono, NumPy"):
            if ours not in middles:
                continue
            mine = middles[ours][kind]
            fastest, leanest = max(p["rate"] for p in peers.values()), min(p["cpu"] for p in peers.values())
            clock, cpu = mine["rate"] / fastest, leanest / mine["cpu"]
            line = f"{ours}, {kind.upper()}: {clock:.2f} times the best peer by the clock, {cpu:.2f} times by CPU time"
            if "decoding alone" in middles:
                alone = middles["decoding alone"][kind]
                clock, cpu = 100 * mine["rate"] / alone["rate"], 100 * alone["cpu"] / mine["cpu"]
                line += f"; {clock:.0f} % of decoding alone by the clock, {cpu:.0f} % by CPU time"
            lines.append(f"* {line}.")
    lines.append(
        "\n† fewer than two windows in which others used less than a tenth of the cores; CPU time is the figure to "
        "trust."
    )
    return "\n".join(lines) + "\n"


def workers(folder: Path, rounds: int, seconds: float, most: int) -> str:
    """Samples a second and memory against the number of worker threads."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= most]
    results: dict[int, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for count in counts:
            if (one := measured("Unisono", folder, "flac", seconds, count)) is not None:
                results[count].append(one)
                print(f"{count} workers: {one}", file=sys.stderr, flush=True)
    lines = ["| workers (threads) | samples/s | CPU ms/sample | MB of the process |", "|---|---|---|---|"]
    for count in counts:
        summary = middle(results[count])
        mark = "" if summary["quiet"] >= 2 else " †"
        lines.append(f"| {count} | {summary['rate']:.0f}{mark} | {summary['cpu']:.2f} | {summary['memory']:.0f} |")
    return "\n".join(lines) + "\n"


def stages(folder: Path, repeat: int) -> str:
    """CPU milliseconds of each stage for one 5 s clip, one thread; the least of several."""
    import unisono_audio as audio
    from unisono_audio import native_core

    lines = ["| stage, CPU ms for a 5 s clip | native | NumPy |", "|---|---|---|"]

    def least(act: Any, count: int) -> float:
        act()
        times = []
        for _ in range(repeat):
            began = process_time()
            act()
            times.append(1e3 * (process_time() - began) / count)
        return min(times)

    backends = ["native", "numpy"] if native_core.module() else ["numpy"]
    rows: dict[str, list[float]] = defaultdict(list)
    for backend in backends:
        for kind in SETS:
            files = [p.read_bytes() for p in sorted((folder / kind / "files").iterdir())[:16]]
            rows[f"decode {kind.upper()} {SETS[kind][0] / 1000:g} kHz"].append(
                least(lambda files=files, b=backend: [audio.decode(f, backend=b) for f in files], len(files))
            )
        x = audio_loaders.clips(44_100)[0]
        y = audio.resample(x, 44_100, 32_000)
        rows["resample 44.1 → 32 kHz"].append(
            least(lambda x=x, b=backend: [audio.resample(x, 44_100, 32_000, backend=b) for _ in range(8)], 8)
        )  # type: ignore[misc]
        rows["filter bank, 128 bands at 32 kHz"].append(
            least(
                lambda y=y, b=backend: [
                    audio.fbank(y, 32_000, 128, window_type="hanning", backend=b) for _ in range(8)
                ],
                8,
            )  # type: ignore[misc]
        )
    lines += [f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |" for name, values in rows.items()]
    return "\n".join(lines) + "\n"


def crops(folder: Path, repeat: int) -> str:
    """A 5 s window of a 60 s recording: by seeking, and by decoding all of it."""
    import io

    import soundfile

    import unisono_audio as audio

    x = np.concatenate(audio_loaders.clips(44_100)[:12])
    rng = np.random.default_rng(0)
    starts = rng.uniform(0, 55, repeat)
    lines = [
        "| 5 s of 60 s, CPU ms (median) | seek | decode all | ratio | largest difference |",
        "|---|---|---|---|---|",
    ]
    for form, subtype in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")):
        file = io.BytesIO()
        with soundfile.SoundFile(file, "w", 44_100, 1, format=form, subtype=subtype) as writer:
            for first in range(0, len(x), 44_100):  # libsndfile overflows its stack on a long OGG in one piece
                writer.write(x[first : first + 44_100])
        data = file.getvalue()
        seconds: dict[str, list[float]] = {"seek": [], "all": []}
        worst = 0.0
        for start in starts:
            began = process_time()
            part, rate = audio.decode(data, start, 5.0)
            seconds["seek"].append(process_time() - began)
            began = process_time()
            whole, _ = audio.decode(data)
            seconds["all"].append(process_time() - began)
            first = int(np.floor(start * rate + 0.5))
            worst = max(worst, float(np.abs(part - whole[first : first + len(part)]).max()))
        seek, all_ = (1e3 * median(seconds[key]) for key in ("seek", "all"))
        lines.append(f"| {form} | {seek:.2f} | {all_:.2f} | {all_ / seek:.1f} | {worst:.0e} |")
    return "\n".join(lines) + "\n"


def scans(folder: Path, rounds: int) -> str:
    """Recordings a second of `unisono data scan`, on all cores."""
    from unisono_audio.sources import open_recordings
    from unisono_audio.sources.scan import scan

    lines = ["| whole clips of 5 s, looked for damage | recordings/s |", "|---|---|"]
    for kind in SETS:
        source = open_recordings(folder / kind / "rows.arrow", label="label")
        rates = []
        for number in range(rounds):
            began = perf_counter()
            done = scan(source, folder / f"{kind}-{number}.jsonl")
            rates.append(done.rows / (perf_counter() - began))
            assert not done.bad
        lines.append(f"| {kind.upper()} {SETS[kind][0] / 1000:g} kHz | {median(rates):.0f} |")
    return "\n".join(lines) + "\n"


def write(name: str, text: str) -> None:
    """Put a table into the page, and leave the others as they are."""
    tables = dict(part.split("\n", 1) for part in page.read_part("audio").split("### ")[1:])
    tables[_HEADS[name]] = text
    parts = (f"### {head}\n\n{tables[head].strip()}\n" for head in _HEADS.values() if head in tables)
    page.put("audio", "\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", nargs=5, help=argparse.SUPPRESS)
    for name in _HEADS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="names of loaders, separated by commas")
    parser.add_argument("--most", type=int, default=2 * (os.cpu_count() or 1), help="worker threads at most")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args()
    if options.window:
        name, folder, kind, seconds, count = options.window
        print(json.dumps(window(name, Path(folder), kind, float(seconds), int(count) if count else None)), flush=True)
        os._exit(0)  # peers leave threads and processes behind
    chosen = [n for n in _HEADS if getattr(options, n)]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for kind in SETS:
            audio_loaders.generate(folder, kind)
        only = [name.strip() for name in options.only.split(",") if name.strip()]
        acts = {
            "stages": lambda: stages(folder, 10),
            "crops": lambda: crops(folder, 20),
            "workers": lambda: workers(folder, options.rounds, options.seconds, options.most),
            "loaders": lambda: loaders(folder, options.rounds, options.seconds, only),
            "scans": lambda: scans(folder, options.rounds),
        }
        for name, act in acts.items():
            if name in chosen or not chosen:
                text = act()
                print(text, flush=True)
                if options.write:
                    write(name, text)


if __name__ == "__main__":
    main()
