"""Determines which process this is from the environment variables of its launcher: torchrun, srun, or none."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping, MutableMapping

from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

RUN_ID_VARIABLE = "UNISONO_RUN_ID"  # what our launcher gives the processes that it starts: its own run id


def launcher_pid(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the process id of our launcher, if it started this process."""
    run_id = environment.get(RUN_ID_VARIABLE)
    if run_id is None or run_id != environment.get("TORCHELASTIC_RUN_ID"):
        return None
    return int(run_id.rpartition("-")[2])


def process_info(environment: Mapping[str, str] = os.environ) -> ProcessInfo | None:
    """Return which process this is according to its launcher; None without a launcher.

    Raises:
        ConfigError: If only some of a launcher's variables are set.
    """
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in wanted if name not in environment]
        if missing:
            raise ConfigError(
                f"RANK and WORLD_SIZE are set, as torchrun does, but not {', '.join(missing)}; set all of them or none"
            )
        rank, world, local, local_world = (int(environment[name]) for name in wanted[:4])
        run_id = environment.get("TORCHELASTIC_RUN_ID")  # of the innermost launcher, which may run inside ours
        launcher = "unisono" if run_id is not None and run_id == environment.get(RUN_ID_VARIABLE) else "torchrun"
        return ProcessInfo(rank, world, local, local_world, launcher)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        world = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
        rank, local = int(environment["SLURM_PROCID"]), int(environment.get("SLURM_LOCALID", "0"))
        return ProcessInfo(rank, world, local, _tasks_on_host(environment, world), "slurm")
    return None


def set_rendezvous_variables(process: ProcessInfo, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of torch's rendezvous under srun, which uses names of its own.

    The first host of the step is the meeting point. The port is derived from the step's number and `UNISONO_TOKEN`, so
    all processes know it, and with a token nobody else does.
    """
    if process.launcher == "slurm":
        environment.setdefault("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"]))
        step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
        environment.setdefault("MASTER_PORT", _derive_port(step, environment))


def meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port at which processes meet without torch.

    At `MASTER_PORT` torchrun may hold a store of its own; then the port is derived from it and from the attempt.
    """
    port = environment["MASTER_PORT"]
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        port = _derive_port(" ".join(environment.get(name, "") for name in names), environment)
    return environment["MASTER_ADDR"], int(port)


def _derive_port(name: str, environment: Mapping[str, str]) -> str:
    """Return a port that all processes of something named derive alike."""
    number = hmac.digest(os.fsencode(environment.get("UNISONO_TOKEN", "")), name.encode(), "sha256")
    return str(20000 + int.from_bytes(number[:4], "big") % 12000)


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> _first_host("gpu[003-005,9],login1"), _first_host("n1"), _first_host("a-[1,3]-x")
    ('gpu003', 'n1', 'a-1-x')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks_on_host(environment: Mapping[str, str], world: int) -> int:
    """Return how many tasks of the step run on this host: Slurm writes `2(x3),1` for 2, 2, 2, 1."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", str(world)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else world
