"""Several processes on this host, by torch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from unisono.config.schema import RunConfig
from unisono.errors import UnisonoError


class WorkerError(UnisonoError):
    """A fault of one process, told once for all of them."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


def launch(config: RunConfig, folder: Path, threads: int) -> None:
    """Start `layout.world_size` processes and wait for them.

    Args:
        config: concrete.
        folder: of the run; the processes read its `config.yaml`.
        threads: CPU threads per process, unless the user's environment says otherwise.

    Raises:
        WorkerError: with the text and the exit code of the first fault.
        KeyboardInterrupt: after all processes have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # its loggers have levels of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # A later attempt must not read the addresses of the earlier one (pytorch/pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback and config.layout.device == "cpu":
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", loopback
        )  # all processes are on this host, whatever its name resolves to
    assert isinstance(config.layout.world_size, int)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.glob("*.fault.json"):
        old.unlink()
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.layout.world_size,
        run_id=f"unisono-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        local_addr="127.0.0.1",
        shutdown_timeout=5,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "unisono.launch.worker", str(folder))
    except SignalException as error:
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        raise _headline(logs, error) from None


def _headline(logs: Path, error: Any) -> WorkerError:
    """The fault to show: a process that died, or the first fault that is not somebody waiting in vain for another."""
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.glob("*.fault.json"))]
    faults.sort(key=lambda fault: (fault["kind"] == "DeadlineError", fault["time"]))
    told = {fault["rank"] for fault in faults}
    deaths = [(rank, failure.exitcode) for rank, failure in error.failures.items() if rank not in told]
    if deaths and (not faults or faults[0]["kind"] == "DeadlineError"):
        rank, code = deaths[0]
        return WorkerError(f"rank {rank} died without a message ({_death(code)}); see {logs}", 1)
    if not faults:
        return WorkerError(f"{error}; see {logs}", 1)
    fault = faults[0]
    if fault["text"].startswith("Traceback"):
        others = f" ({len(faults) - 1} other processes report a fault too; see {logs})" if len(faults) > 1 else ""
        return WorkerError(f"rank {fault['rank']} failed{others}\n{fault['text']}", fault["code"])
    return WorkerError(fault["text"], fault["code"])


def _death(exitcode: int) -> str:
    if exitcode == -9:
        return "killed by signal 9; out of memory?"
    return f"killed by signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
