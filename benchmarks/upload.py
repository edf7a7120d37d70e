"""What an upload beside the training costs its steps, in a process of its own (ours) and in a thread of rank 0.

    PYTHONPATH=src python -m benchmarks.upload [--rounds 5] [--megabytes 256]

A step is some products of matrices on one thread and some plain Python, as a training loop has both. Each round takes
steps with nothing beside them, and steps while a checkpoint goes to a server that speaks S3 (moto, in a process of its
own on the same host, where it takes a core that a real one would not) or to a folder, in turn. Told are the ratio of
the median step to that of the same round with nothing beside it, the slowest step, how long the upload took, and how
long the loop was held up by handing it over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import store_lock, upload
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.upload import Uploads
from unisono.checkpoint.remote.upload_process import CheckpointUploader
from unisono.config.schema.run import RunConfig
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import SingleProcess

BUCKET = "checkpoints"
SERVE = """
import sys, time, logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


def step(matrices: torch.Tensor) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    for _ in range(6):
        torch.mm(matrices, matrices)
    sum(i * i for i in range(60_000))
    return time.perf_counter() - began


def steps_until(done: Any, matrices: torch.Tensor, least: int) -> list[float]:
    """Times of steps, at least so many, until something is done."""
    seconds: list[float] = []
    while len(seconds) < least or not done():
        seconds.append(step(matrices))
    return seconds


def by_process(config: RunConfig, folder: Path, path: Path, matrices: torch.Tensor) -> tuple[list[float], float]:
    """Steps beside an upload as a run makes it, and the seconds that handing it over took."""
    store_lock.claim(require_store(config), folder)
    uploads = Uploads(config, folder, True, lambda _: None, lambda *_: None)
    time.sleep(3.0)  # its process has started long before the first checkpoint of a run

    def done() -> bool:
        uploads.check()
        return uploads.uploaded is not None

    began = time.perf_counter()
    uploads.enqueue(path)
    handed = time.perf_counter() - began
    steps = steps_until(done, matrices, 1)
    while uploads.wait():
        pass
    uploads.finish()
    return steps, handed


def by_thread(config: RunConfig, folder: Path, path: Path, matrices: torch.Tensor) -> list[float]:
    """Steps beside the same upload in a thread of this process."""
    sender, files = (
        CheckpointUploader(require_store(config), folder, None, Retention(2)),
        commit.read_manifest(path).files,
    )
    thread = threading.Thread(target=sender.commit, args=(path, path.name, files))
    thread.start()
    return steps_until(lambda: not thread.is_alive(), matrices, 1)


def require_store(config: RunConfig) -> ObjectStore:
    """Where a run's checkpoints go."""
    store = upload.open_store(config)
    assert store is not None
    return store


def configuration(url: str, name: str) -> RunConfig:
    """A run that uploads."""
    groups: dict[str, Any] = {"recipe": "x", "train": {"steps": 1}, "optim": {"kind": "sgd"}, "run": {"name": name}}
    return RunConfig.model_validate({**groups, "checkpoint": {"upload": {"url": url}}})


def main() -> None:
    """Measure, and print a table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--megabytes", type=int, default=256)
    arguments = words.parse_args()
    torch.set_num_threads(1)
    matrices = torch.randn(512, 512)
    results: dict[str, list[tuple[float, float, float, float]]] = {}
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
        os.environ["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        with tempfile.TemporaryDirectory() as directory:
            data = torch.randn(arguments.megabytes << 18)
            shards = [ArrayShard("w", (len(data),), (0,), data)]
            path = commit.save_checkpoint(
                Path(directory) / "checkpoints", commit.Snapshot(1, shards, {}), SingleProcess(), 2
            )
            for number in range(arguments.rounds):
                for kind, url in (("S3", f"s3://{BUCKET}"), ("folder", f"file://{directory}/store")):
                    (folder := Path(directory) / f"run {number} {kind}").mkdir()
                    alone = statistics.median(steps_until(lambda: True, matrices, 60))
                    own, handed = by_process(configuration(url, f"own{number}"), folder, path, matrices)
                    shared = by_thread(configuration(url, f"shared{number}"), folder, path, matrices)
                    for name, times, held in (("process", own, handed), ("thread", shared, 0.0)):
                        row = (statistics.median(times) / alone, max(times) / alone, sum(times), held)
                        results.setdefault(f"{kind}, {name}", []).append(row)
                shutil.rmtree(Path(directory) / "store", ignore_errors=True)
    finally:
        server.kill()
    print(f"{arguments.megabytes} MB, medians of {arguments.rounds} rounds; ratios to a step with nothing beside it")
    print("| to, by | median step | slowest step | upload, s | handed over, ms |\n|---|---|---|---|---|")
    for name, rows in results.items():
        median, slowest, seconds, held = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {median:.2f} | {slowest:.1f} | {seconds:.1f} | {1e3 * held:.1f} |")


if __name__ == "__main__":
    main()
