"""`launcher=` of every verb that takes it: what is checked here before anything is submitted, and what runs there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.config import compose
from unisono.config.schema.verbs import Prepare
from unisono.launch.launcher import Hosts, find_launcher, resolve_layout
from unisono.proof.cases import ProofSettings
from unisono.proof.scripts.script_proof import ScriptSettings
from unisono.task_config import validate_config
from unisono_sweeps.settings import SweepSettings
from unisono_sweeps.study import SearchSettings

from .launchers.test_kubernetes import refuse_unknown
from .written import TASK

Command = Callable[..., tuple[int, str, str]]
POD = ("launcher=kubernetes", "image=i", "claim=c")
LINEAR = ("optim=sgd", "train.steps=3", "train.global_batch=8")
LANGUAGE = Path(__file__).parents[3] / "README.md"
SCRIPT = "print('trained')\n"


def written() -> tuple[dict[str, Any], list[str]]:
    """The only JobSet, and its command from `unisono` on."""
    (file,) = Path().glob("runs/*/*.jobset.yaml") if Path("runs/launched").is_dir() else Path().glob("runs/*/*/*.yaml")
    made = yaml.safe_load(file.read_text())
    refuse_unknown(made)
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "unisono"]
    return container, container["command"][3:]


def test_a_run_of_several_nodes_is_one_jobset_of_as_many_pods(command: Command) -> None:
    words = ("train", TASK, *LINEAR, "run.name=mine", "layout.device=cuda", *POD, "nodes=2", "gpus=4")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "mine: written" in out
    assert "start it: kubectl apply -f runs/launched/mine.jobset.yaml" in out
    container, said = written()
    join = ["launch.nodes=2", "launch.node_rank=$(JOB_COMPLETION_INDEX)"]
    assert said[: len(LINEAR) + 6] == ["train", TASK, *LINEAR, "run.name=mine", "layout.device=cuda", *join]
    assert container["resources"] == {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "4"}}


def test_a_proof_is_one_pod_with_a_core_for_each_process_of_its_largest_layout(command: Command) -> None:
    code, _, err = command("prove", TASK, *LINEAR, "layouts=[ddp:2,hsdp:2x2]", "--full", *POD)
    assert (code, err) == (0, "")
    container, said = written()
    assert said == ["prove", TASK, *LINEAR, "layouts=[ddp:2,hsdp:2x2]", "--full"]
    assert container["resources"] == {"requests": {"cpu": "4"}}


def test_a_proof_of_a_script_leaves_the_words_of_the_script_alone(command: Command) -> None:
    Path("train.py").write_text(SCRIPT)
    given = ["--", "time=3", "launcher=own", "nodes=2"]
    code, _, err = command("prove", "train.py", "worlds=[1,3]", *POD, *given)
    assert (code, err) == (0, "")
    container, said = written()
    assert said == ["prove", "train.py", "worlds=[1,3]", *given]
    assert container["resources"]["requests"]["cpu"] == "3"


def test_data_are_prepared_in_one_pod_with_a_core_for_each_worker(command: Command) -> None:
    words = ("language", "data=corpus", f"data.path={LANGUAGE}", "out=tokens", "shard=1/2", "workers=6")
    code, _, err = command("data", "prepare", *words, *POD, "memory_gb=10")
    assert (code, err) == (0, "")
    container, said = written()
    assert said == ["data", "prepare", *words]
    assert container["resources"]["requests"] == {"cpu": "6", "memory": "10000M"}


def test_a_search_is_one_pod_in_which_its_trials_run(command: Command) -> None:
    pytest.importorskip("optuna")
    words = ("search", TASK, *LINEAR, "optim.lr=tag(log,interval(1e-4,1e-1))", "trials=3", "metric=loss", "name=q")
    code, out, err = command(*words, "jobs=2", *POD, "gpus=2")
    assert (code, err) == (0, "")
    assert "start it: kubectl apply -f runs/q/console/q.jobset.yaml" in out
    container, said = written()
    assert said == [*words, "jobs=2"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert not Path("runs/q/study.journal").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", TASK, "optim.lrr=1"], "unknown key 'optim.lrr' (override 'optim.lrr=1'), did you mean"),
        (["train", TASK, "nodes=3", "layout.world_size=2"], "which cannot be divided among them; set layout.world_si"),
        (["train", TASK, "gpus=2", "layout.world_size=4", "layout.device=cuda"], "use gpus=4, or a smaller layout.wo"),
        (["prove", TASK, "optim.lrr=1"], "unknown key 'optim.lrr'"),
        (["prove", TASK, "layouts=[dpp:2]"], "layouts: 'dpp:2' is not a layout"),
        (["prove", TASK, "nodes=2"], "runs on one host; leave nodes= out: a proof starts all"),
        (["prove", "train.py", "world=[1,2]"], "'world=[1,2]' is not a setting of a proof of a script"),
        (["data", "prepare", "language", "nodes=2"], "start parts as jobs of their own: shard=1/2, shard=2/2"),
        (["data", "prepare", "language", "shard=2"], "shard=2: write shard=i/n"),
        (["search", TASK, *LINEAR, "optim.lrr=1,2", "trials=3"], "unknown key 'optim.lrr'"),
        (["search", TASK, *LINEAR, "optim.lr=1,2", "trials=3", "nodes=2"], "its trials run there, jobs= at a time"),
        (["train", TASK, "launcher=slurmm"], "launcher=slurmm: no such launcher"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    command: Command, words: list[str], message: str
) -> None:
    pytest.importorskip("optuna")
    Path("train.py").write_text(SCRIPT)
    code, _, err = command(*words, *POD[any(word.startswith("launcher=") for word in words) :])
    assert code == 2
    assert message in err
    assert not Path("runs").exists()


def test_a_single_command_on_this_host_needs_no_launcher(command: Command) -> None:
    code, _, err = command("train", TASK, *LINEAR, "layout.device=cpu", "run.name=a", "launcher=local")
    assert (code, err) == (0, "")
    assert Path("runs/a/config.yaml").is_file()


def test_devices_that_only_the_cluster_has_are_not_asked_of_the_host_where_the_command_is_typed() -> None:
    def layout(*words: str, **hosts: Any) -> tuple[Any, ...]:
        config = validate_config(compose.compose(TASK, [*LINEAR, *words]))
        found = resolve_layout(config, Hosts(**hosts)).layout
        return found.world_size, found.strategy, found.device

    assert layout("layout.device=cuda", gpus=4) == (4, "ddp", "cuda")
    assert layout("layout.strategy=fsdp", nodes=2, gpus=4) == (8, "fsdp", "cuda")
    assert layout(nodes=2) == (2, "ddp", "cpu")
    assert layout("layout.device=cpu", nodes=2, gpus=4) == (2, "ddp", "cpu")


def test_no_word_of_a_launcher_means_something_else_to_a_verb_that_takes_it() -> None:
    """The words of a launcher stand among those of the verb, without a group."""
    verbs = {*SweepSettings.model_fields, *SearchSettings.model_fields, *ProofSettings.model_fields}
    verbs |= {*ScriptSettings.model_fields, *Prepare.model_fields}
    for name in ("local", "slurm", "ray", "kubernetes"):
        assert not set(find_launcher(name).Settings.model_fields) & verbs
