"""A real Slurm on this host, for tests: one controller and two nodes, without systemd, cgroups or accounting.

Needs root and Debian's `slurmctld slurmd slurm-client munge`. Everything lies in one folder and ends with the context.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.ports import free_port

NEEDED = ("slurmctld", "slurmd", "srun", "munged", "setpriv")


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    absent = [name for name in NEEDED if not (shutil.which(name) or Path(f"/usr/sbin/{name}").exists())]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "needs root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster; yields the variables by which Slurm's commands find it."""
    host = socket.gethostname()
    folder.chmod(0o755)
    config = folder / "slurm.conf"
    nodes = {host: free_port(), f"{host}-b": free_port()}  # ranks meet at the first, whose name has to resolve
    shared = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=40000 Gres=gpu:2"
    for number in range(2):
        (folder / f"gpu{number}").touch()  # an accelerator that Slurm counts, and nobody has
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-1]\n")
    config.write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
{chr(10).join(f"NodeName={name} Port={port} {shared}" for name, port in nodes.items())}
PartitionName=all Nodes={host},{host}-b Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={host},{host}-b MaxTime=INFINITE State=UP PriorityTier=9
"""
    )
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    munge = ["munged", "-F", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--force"]
    commands = [munge, ["slurmctld", "-D", "-f", str(config)]]
    commands += [["slurmd", "-D", "-N", node, "-f", str(config)] for node in nodes]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as output:
                running.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            if command is munge:
                jobs.wait_for((folder / "munge.socket").exists, 30)
        show = ["sinfo", "-h", "-o", "%T", "-N", "-p", "all"]

        def idle() -> bool:
            shown = subprocess.run(show, env=environment, capture_output=True, text=True).stdout
            return shown.split() == ["idle"] * 2

        jobs.wait_for(idle, 30)
        yield {name: environment[name] for name in ("SLURM_CONF", "PATH")}
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:  # a node waits for a step whose end it has missed
                process.kill()
                process.wait(timeout=20)
