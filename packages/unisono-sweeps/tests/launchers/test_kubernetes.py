"""`launcher=kubernetes`: what is written is a JobSet, and runs what a user would type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.config import compose
from unisono.launch.launcher import Job
from unisono.task_config import validate_config
from unisono_sweeps.launchers.kubernetes import KubernetesLauncher, build_jobset, name_jobset

from ..written import TASK

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
BASE = ("optim=sgd", "train.steps=3", "train.global_batch=8", "name=s", "trial=false", "launcher=kubernetes")
PLACE = ("image=registry.example/unisono:1", "claim=shared")
Command = Callable[..., tuple[int, str, str]]


def settings(**words: object) -> KubernetesLauncher.Settings:
    return KubernetesLauncher.Settings.model_validate({"image": "i", "claim": "c", **words})


def refuse_unknown(values: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(values)


def job(**needs: int) -> Job:
    command = ("/usr/bin/python3", "-m", "unisono", "train", "language", "run.dir=runs/s", "run.name=lr0.1")
    return Job("lr0.1", command, Path("runs/s/lr0.1"), Path("runs/s/console/lr0.1.log"), **needs)


def test_a_sweep_is_written_as_one_jobset_for_each_run(command: Command) -> None:
    code, out, _ = command("sweep", TASK, *BASE, *PLACE, "optim.lr=0.1,0.01", "seeds=2")
    assert code == 0
    assert "lr0.1-seed0: written" in out
    assert "start them: kubectl apply -f runs/s/console" in out
    assert "compare" not in out
    written = [yaml.safe_load(path.read_text()) for path in sorted(Path("runs/s/console").glob("*.jobset.yaml"))]
    for one in written:
        refuse_unknown(one)
    assert len({one["metadata"]["name"] for one in written}) == 4
    (container,) = written[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    place = ["run.dir=runs/s", "run.name='lr0.01-seed0'"]
    words = ["optim=sgd", "train.steps=3", "train.global_batch=8", "optim.lr=0.01", "run.seed=0", *place]
    assert container["command"] == ["python", "-m", "unisono", "train", TASK, *words]
    assert container["image"] == "registry.example/unisono:1"


def test_the_pods_of_a_run_of_several_nodes_meet_at_the_first(command: Command) -> None:
    words = settings(
        nodes=2, gpus=4, memory_gb=64, pod_env={"NCCL_DEBUG": "WARN"}, secret="token", queue="team", namespace="ml"
    )
    made = build_jobset(job(processes=8, devices=8, workers=16), words)
    refuse_unknown(made)
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (2, 2)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64000M"}, "limits": {"memory": "64000M", "nvidia.com/gpu": "4"}
    }  # fmt: skip
    name = made["metadata"]["name"]
    own = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"][7:]]
    assert own == [
        "launch.nodes=2", "launch.node_rank=1", f"launch.rendezvous={name}-nodes-0-0.{name}:29400",
        "launch.start_timeout=1800",
    ]  # fmt: skip
    config = validate_config(compose.compose(TASK, [*own, "layout.world_size=8"]))
    assert (config.launch.nodes, config.launch.node_rank) == (2, 1)


@pytest.mark.parametrize(
    "field", ["metadata.namee", "spec.failurePolicy.maxRestart", "spec.replicatedJobs.0.template.spek"]
)
def test_the_schema_refuses_a_field_that_a_jobset_does_not_have(field: str) -> None:
    made = build_jobset(job(), settings())
    refuse_unknown(made)
    *way, last = field.split(".")
    inner: Any = made
    for key in way:
        inner = inner[int(key)] if key.isdecimal() else inner[key]
    inner[last] = 1
    with pytest.raises(jsonschema.ValidationError, match=f"'{last}' was unexpected"):
        refuse_unknown(made)


def test_names_are_those_of_kubernetes_and_differ_between_runs() -> None:
    long = Job("9_" + "Width." * 30, (), Path("runs/a"), Path("log"))
    assert len(name_jobset(long)) <= 40
    assert name_jobset(long).startswith("run-9-width-")
    jobs = [Job(name, (), Path("runs") / name, Path("log")) for name in ("lr0.1", "lr0-1")]
    assert len({name_jobset(one) for one in jobs}) == 2


def test_what_cannot_run_on_a_cluster_is_refused(command: Command) -> None:
    code, _, err = command("sweep", TASK, *BASE, "optim.lr=0.1,0.01")
    assert code == 2
    assert "image is missing: add image=… (container image with Unisono" in err
    assert "; claim is missing: add claim=… (PersistentVolumeClaim" in err
    code, _, err = command("sweep", TASK, *BASE, *PLACE, "optim.lr=0.1,0.01", "nodes=2", "layout.world_size=1")
    assert "nodes=2: lr0.1 has 1 process, which cannot be divided among them" in err
    code, _, err = command("sweep", TASK, *BASE, *PLACE, "optim.lr=0.1,0.01", "run.dir=/elsewhere")
    assert "run.dir=/elsewhere/s is outside of mount=/work, where a pod has the volume" in err
