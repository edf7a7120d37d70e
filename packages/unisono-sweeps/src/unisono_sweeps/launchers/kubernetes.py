"""`launcher=kubernetes`: writes each run as a JobSet, for `kubectl apply`; it talks to no cluster itself.

A run of several nodes is one indexed Job with a pod for each node, in which `unisono train` starts the node's processes
and meets the others at the first pod, whose name the JobSet makes known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator

from unisono.config import schema
from unisono.config.schema import Positive
from unisono.launch.launcher import Ended, Hosts, Job
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.runtime.files import write_whole
from unisono_sweeps.launchers.hosts import PORT, join_words, list_cores, refuse_misfit
from unisono_sweeps.settings import parse_list

_LONGEST = 40  # characters of a JobSet's name, from which those of its pods are made, which may have 63
_NODES = "nodes"  # its only Job
_NO_RESTART = [2, 3, 4]  # exit codes after which a restart would end in the same way: settings, numbers, guards
_VOLUME = "runs"


class KubernetesLauncher:
    """Writes JobSets; see `unisono.launch.launcher.Launcher`."""

    class Settings(schema.Settings):
        """The words of `launcher=kubernetes`."""

        image: str = Field(min_length=1, description="container image with Unisono, the recipe and its libraries")
        claim: str = Field(
            min_length=1, description="PersistentVolumeClaim for runs and data, which all nodes can write"
        )
        mount: PurePosixPath = Field(
            PurePosixPath("/work"), description="where it is mounted; paths of the command are relative to it"
        )
        namespace: str | None = Field(None, description="of the JobSets; null: that of kubectl")
        nodes: PositiveInt = Field(1, description="pods of each run, on different hosts")
        gpus: NonNegativeInt = Field(0, description="accelerators of each")
        gpu_resource: str = Field("nvidia.com/gpu", description="how the cluster names them")
        cpus: PositiveInt | None = Field(
            None, description="cores of each; null: max(memory_gb // 10, workers), and one for each process at least"
        )
        memory_gb: Positive | None = Field(None, description="memory of each; null: no limit")
        pod_env: Annotated[dict[str, str], BeforeValidator(parse_list)] = Field(
            {}, description="environment variables, e.g. {NCCL_DEBUG: WARN}"
        )
        secret: str | None = Field(
            None, description="Secret whose entries are environment variables, e.g. UNISONO_TOKEN"
        )
        queue: str | None = Field(None, description="LocalQueue of Kueue")
        max_restarts: NonNegativeInt = Field(10, description="restarts of a run that is preempted or whose node fails")
        grace_seconds: PositiveInt = Field(60, description="to save and stop; more than launch.preempt_deadline")
        python: str = Field("python", description="the interpreter in the image")

        @field_validator("mount")
        @classmethod
        def _check_mount(cls, mount: PurePosixPath) -> PurePosixPath:
            if not mount.is_absolute():
                raise ValueError("must be an absolute path")
            return mount

    begins, waits = "written", False

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def hosts(self) -> Hosts:
        """See the interface."""
        return Hosts(self._settings.nodes, self._settings.gpus)

    def check(self, jobs: Sequence[Job]) -> None:
        """See the interface."""
        mount = self._settings.mount
        for job in jobs:
            refuse_misfit(job, self.hosts())
            if job.folder.is_absolute() and not job.folder.is_relative_to(mount):
                raise ConfigError(
                    f"run.dir={job.folder.parent} is outside of mount={mount}, where a pod has the volume: what it "
                    f"wrote there would be lost with it; use a relative run.dir, or one under {mount}"
                )

    def under_way(self, consoles: Path) -> Mapping[str, str]:
        """None: what runs on the cluster is not asked."""
        return {}

    def run(
        self,
        jobs: Iterable[Job],
        started: Callable[[Job], None],
        ended: Callable[[Job, Ended], None],
        stops: Callable[[Job], bool] | None = None,
    ) -> None:
        """Write a file for each job; `ended` is called for none."""
        jobs = list(jobs)
        if not jobs:
            return
        folder = jobs[0].console.parent
        folder.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            text = yaml.safe_dump(build_jobset(job, self._settings), sort_keys=False, width=120)
            write_whole(folder / f"{job.name}.jobset.yaml", text)
            started(job)
        files = f"{folder}/{jobs[0].name}.jobset.yaml" if len(jobs) == 1 else str(folder)
        say(f"start {'it' if len(jobs) == 1 else 'them'}: kubectl apply -f {files}")


def build_jobset(job: Job, settings: KubernetesLauncher.Settings) -> dict[str, Any]:
    """The JobSet of a run, version `v1alpha2`; `jobset.schema.json` has the fields that it uses."""
    name = name_jobset(job)
    first = f"{name}-{_NODES}-0-0.{name}:{PORT}"
    number = "$(JOB_COMPLETION_INDEX)"  # which Kubernetes sets in each pod of an indexed Job, and replaces in arguments
    command = [settings.python, *job.command[1:], *join_words(job, settings.nodes, number, first)]
    container: dict[str, Any] = {
        "name": "unisono",
        "image": settings.image,
        "command": command,
        "workingDir": str(settings.mount),
        "env": [{"name": key, "value": value} for key, value in settings.pod_env.items()],
        **({"envFrom": [{"secretRef": {"name": settings.secret}}]} if settings.secret else {}),
        "resources": _resources(job, settings),
        "volumeMounts": [
            {"name": _VOLUME, "mountPath": str(settings.mount)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # the JobSet restarts all nodes together, and each resumes from its checkpoint
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "containers": [container],
        "volumes": [
            {"name": _VOLUME, "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL needs more than the 64 MB of a container
        ],
    }
    if settings.nodes > 1:
        apart = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
        term = {"labelSelector": apart, "topologyKey": "kubernetes.io/hostname"}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "unisono", "operator": "In", "values": _NO_RESTART}}
    template = {
        "parallelism": settings.nodes,
        "completions": settings.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [rule]},
        "template": {"spec": pod},
    }
    labels = {"app.kubernetes.io/name": "unisono"}
    if settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    never = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            **({"namespace": settings.namespace} if settings.namespace else {}),
            "labels": labels,
            "annotations": {"unisono/run": str(job.folder)},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": settings.max_restarts, "rules": [never]},
            "replicatedJobs": [{"name": _NODES, "replicas": 1, "template": {"spec": template}}],
        },
    }


def name_jobset(job: Job) -> str:
    """A name that Kubernetes takes, and that only this run has.

    >>> name_jobset(Job("lr0.1-seed0", (), Path("runs/s/lr0.1-seed0"), Path("log")))
    'lr0-1-seed0-86161d'
    """
    stem = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-") or "run"
    if not stem[0].isalpha():
        stem = f"run-{stem}"
    digest = hashlib.sha256(str(job.folder).encode()).hexdigest()[:6]
    return f"{stem[: _LONGEST - 7].rstrip('-')}-{digest}"


def _resources(job: Job, settings: KubernetesLauncher.Settings) -> dict[str, Any]:
    cores = list_cores(job, settings.nodes, settings.cpus, settings.memory_gb)
    wanted: dict[str, Any] = {"cpu": str(cores)}
    limits: dict[str, Any] = {}
    if settings.memory_gb is not None:
        wanted["memory"] = limits["memory"] = f"{round(settings.memory_gb * 1000)}M"
    if settings.gpus:
        limits[settings.gpu_resource] = str(settings.gpus)
    return {"requests": wanted, **({"limits": limits} if limits else {})}
