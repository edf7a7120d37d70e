"""Where processes of one host, and of one step of Slurm, meet: nobody else gets in, or can tell where it is."""

from __future__ import annotations

import os
import shutil

from unisono.launch.cluster import set_rendezvous_variables
from unisono.launch.processes.monitor_client import make_memory_directory
from unisono.runtime.communication.communicator import ProcessInfo


def test_processes_of_one_host_meet_in_a_folder_that_only_this_user_enters() -> None:
    """The store of torch, through which others could fill the processes' memory, lies there, whatever the umask is."""
    before = os.umask(0)
    try:
        folder = make_memory_directory()
    finally:
        os.umask(before)
    try:
        status = folder.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.geteuid())
    finally:
        shutil.rmtree(folder)


def test_the_port_of_a_step_depends_on_the_token_which_may_be_any_bytes() -> None:
    ports = set()
    for token in ("", "a", os.fsdecode(b"\xff")):
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "UNISONO_TOKEN": token}
        set_rendezvous_variables(ProcessInfo(0, 2, 0, 1, "slurm"), step)
        ports.add(step["MASTER_PORT"])
    assert len(ports) == 3
