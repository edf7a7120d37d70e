"""Training on rows behind a slow network: how long steps take with the default workers for it, and with others.

    python -m benchmarks.remote_loading [--rounds 3] [--steps 40] [--latency 0.05]

A server in a process of its own answers every request for a range of a file after `--latency` seconds, as an object
store does. Tasks read it as a user's would: *recordings* are WAV files, one request each (audio behind `metadata.csv`);
*tokens* are Parquet, read by blocks (`data.shuffle=blocks`) of a row group each. A step takes 20 ms besides (the loss
sleeps), with 8 rows. Every setting is a run of `unisono.train`, in turn with the others; the first 10 steps are left
out. `local` has what local files have (1 worker, `data.storage=local`), `remote` is the default for a URL.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unisono
import unisono_audio as audio
from unisono import Batch, Context, Loss, Task
from unisono_audio.sources import open_recordings
from unisono_speech.show import write_wav

ROWS, STEP_SECONDS, WARM_UP, ROW_GROUP = 2000, 0.02, 10, 16
SETTINGS = {
    "local: 1 worker": ["data.storage=local"],
    "2 workers": ["data.workers=2"],
    "4 workers": ["data.workers=4"],
    "remote: 8 workers": [],
    "16 workers": ["data.workers=16"],
    "auto": ["data.workers=auto"],
}


class _Slow(BaseHTTPRequestHandler):
    """Ranges of files, each after a pause."""

    protocol_version = "HTTP/1.1"
    folder = Path()
    latency = 0.0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        time.sleep(self.latency)
        path = self.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        last = min(int(wanted[2]) + 1, len(content)) if wanted and wanted[2] else len(content)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[first:last])

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def serve(folder: Path, latency: float) -> None:
    """Serve until killed, and print the port first."""
    _Slow.folder, _Slow.latency = folder, latency
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


@contextmanager
def serving(folder: Path, latency: float) -> Iterator[str]:
    """The URL of a server in another process."""
    command = [sys.executable, "-m", "benchmarks.remote_loading", "--serve", str(folder), "--latency", str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


class _Slept(Task):
    """A model that does nothing for as long as a step takes."""

    def build(self) -> Any:
        return torch.nn.Linear(1, 1)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"loss": float(len(batch["value"]))}

    def outputs(self, model: Any, batch: Batch, context: Context) -> Any:
        return model(batch["value"])

    def loss(self, outputs: Any, batch: Batch, context: Context) -> Loss:
        time.sleep(STEP_SECONDS)
        return Loss({"loss": outputs.square().sum()})


class Recordings(_Slept):
    """Recordings by URL; the mean of each."""

    location = ""

    def data(self) -> Any:
        return open_recordings(self.location)

    def sample(self, record: Any, context: Any) -> Any:
        return {"value": np.array([audio.decode(record["audio"]).samples.mean()], dtype=np.float32)}


class Tokens(_Slept):
    """Rows of Parquet by URL; the mean of each."""

    location = ""

    def data(self) -> Any:
        return unisono.open_source(self.location, "tokens")

    def sample(self, record: Any, context: Any) -> Any:
        return {"value": np.array([np.asarray(record).mean() / 1e4], dtype=np.float32)}


def write(folder: Path) -> None:
    """Two seconds of noise in each of some files, and rows of 2048 tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for number in range(64):
        write_wav(folder / f"{number}.wav", rng.normal(scale=0.1, size=32_000).astype(np.float32), 16_000)
    tokens = pa.array(list(rng.integers(50_000, size=(ROWS, 2048), dtype=np.uint16)), pa.list_(pa.uint16()))
    pq.write_table(pa.table({"tokens": tokens}), folder / "rows.parquet", row_group_size=ROW_GROUP)


def set_locations(folder: Path, url: str) -> None:
    """Tell the tasks where their rows are."""
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file"], *([f"{url}/{number % 64}.wav"] for number in range(ROWS))])
    Recordings.location, Tokens.location = str(folder / "metadata.csv"), f"{url}/rows.parquet"


def measure(task: type[Task], words: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Milliseconds of a step, and the share of it that waits for data."""
    request = [
        "optim=sgd", "optim.lr=0.0", f"train.steps={steps}", "train.global_batch=8", f"run.dir={folder}",
        f"run.name=run-{time.monotonic_ns()}", "eval.every=null", f"checkpoint.every={steps}", "observe.trackers=[]",
        "observe.progress=false", "layout.threads=1",
    ]  # fmt: skip
    blocks = ["data.shuffle=blocks"] if task is Tokens else []
    result = unisono.train(task, [*request, *blocks, *words])
    lines = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    late = [line for line in lines if "data_wait" in line and line["step"] > WARM_UP]
    seconds = sum(line["seconds"] for line in late)
    return {
        "ms": 1e3 * seconds / len(late),
        "wait": sum(line["seconds"] * line["data_wait"] for line in late) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve:
        serve(words.serve, words.latency)
        return
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        with serving(folder, words.latency) as url:
            set_locations(folder, url)
            for number in range(words.rounds):
                for task in (Recordings, Tokens):
                    for setting, options in SETTINGS.items():
                        row = measure(task, options, words.steps, folder / "runs")
                        results.setdefault((setting, task.__name__), []).append(row)
                        print(f"  {number + 1} {task.__name__}, {setting}: {row}", flush=True)
    print("| | recordings: ms a step | waits | tokens: ms a step | waits |\n|---|---|---|---|---|")
    for setting in SETTINGS:
        cells = [setting]
        for kind in ("Recordings", "Tokens"):
            runs = results[setting, kind]
            times = sorted(run["ms"] for run in runs)
            cells.append(f"{statistics.median(times):.0f} ({times[0]:.0f} to {times[-1]:.0f})")
            cells.append(f"{100 * statistics.median(run['wait'] for run in runs):.0f} %")
        print("| " + " | ".join(cells) + " |")
    print(
        f"\n{words.rounds} rounds of {words.steps} steps, {1e3 * words.latency:g} ms a request; "
        f"{platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    main()
