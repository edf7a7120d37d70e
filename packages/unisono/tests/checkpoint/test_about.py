"""What a run is made of: compared between all processes, and with a checkpoint."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration
from unisono.checkpoint.core import provenance
from unisono.config import environment
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError, RunError

# between processes --------------------------------------------------------------------------------------------------


class Told:
    """A group whose members say what they are given here; this process is the first of them."""

    rank = 0

    def __init__(self, *everyone: dict[str, dict[str, Any]]) -> None:
        self.everyone, self.size, self.asked = everyone, len(everyone), 0

    def gather(self, value: Any, what: str) -> list[Any]:
        self.asked += 1
        if self.asked == 1:
            return [
                [f"host{rank}", {part: provenance._digest(values) for part, values in mine.items()}]
                for rank, mine in enumerate(self.everyone)
            ]
        return [{part: mine[part] for part in value} for mine in self.everyone]

    def barrier(self, what: str) -> None: ...


def given(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {
        "the configuration": {"optim.lr": 0.1, "run.seed": 0},
        "the versions": {"torch": "2.13"},
        "the code": {"a.py": "1", "b.py": "1"},
        "the environment": {"OMP_NUM_THREADS": "1"},
    }
    return {part: {**values, **changes.get(part.split()[1], {})} for part, values in parts.items()}


def test_processes_that_were_given_the_same_agree_with_one_message() -> None:
    group = Told(given(), given(), given())
    provenance.check_agreement(group, given())
    assert group.asked == 1
    provenance.check_agreement(SingleProcess(), given())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"configuration": {"optim.lr": 0.2}}, "the configuration: optim.lr is 0.1 on rank 0 and 0.2 on rank 2"),
        ({"versions": {"torch": "2.12"}}, "the versions: torch is '2.13' on rank 0 and '2.12' on rank 2"),
        ({"code": {"b.py": "2"}}, "the code: b.py has changed"),
        (
            {"environment": {"NVIDIA_TF32_OVERRIDE": "1"}},
            "the environment: NVIDIA_TF32_OVERRIDE is not set on rank 0 and '1' on rank 2",
        ),
    ],
)
def test_what_ranks_differ_in_is_named_with_both_values(changes: dict[str, dict[str, Any]], told: str) -> None:
    with pytest.raises(RunError) as caught:
        provenance.check_agreement(Told(given(), given(), given(**changes)), given())
    assert str(caught.value).startswith(f"rank 0 on host0 and rank 2 on host2 differ in {told}. Start all ranks with ")


def test_every_part_that_differs_and_all_ranks_are_named() -> None:
    other = given(configuration={"optim.lr": 0.2}, code={"c.py": "1"})
    with pytest.raises(RunError) as caught:
        provenance.check_agreement(Told(given(), other, given(), other), given(), "node")
    assert "node 0 on host0 and node 1 on host1 differ in the configuration (node 3 too): " in str(caught.value)
    assert "differ in the code (node 3 too): c.py is new" in str(caught.value)


def disagree(place: ProcessInfo, group: Communicator) -> str:
    config = configuration()
    try:
        provenance.check_agreement(group, provenance.shared_inputs(config))
        agreed = True
        provenance.check_agreement(group, {"the data": {"rows": 7 + place.rank}})
    except RunError as error:
        return f"{agreed} {error}"
    return "no difference"


def test_real_processes_agree_and_say_the_same_where_they_do_not() -> None:
    first, second = processes.run(disagree, 2)
    assert first == second
    assert first.startswith("True rank 0 and rank 1 differ in the data: rows is 7 on rank 0 and 8 on rank 1. ")
    assert platform.node() not in first


# what is looked at --------------------------------------------------------------------------------------------------


def test_variables_that_change_numbers_or_communication_are_looked_at_and_secrets_are_not() -> None:
    variables = {
        "OMP_NUM_THREADS": "2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "1",
        "NCCL_ALGO": "Ring",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "3",
        "TORCH_HOME": "/home/me",
        "NCCL_DEBUG": "INFO",
        "TORCH_API_KEY": "x",
        "HF_TOKEN": "hf_x",
        "HOME": "/home/me",
        "RANK": "3",
    }
    assert list(environment.relevant_variables(variables)) == sorted(list(variables)[:5])
    on_cpu = environment.relevant_variables(variables, "cpu")
    assert list(on_cpu) == sorted(list(variables)[:4]), "`auto` sets the allocator of accelerators, a resume does not"


def test_what_a_run_is_made_of_comes_back_from_json_as_it_was() -> None:
    told = provenance.describe_run(configuration(), {"rows": 27, "shown": object()}, ProcessInfo())
    assert told["data"] == {"rows": 27}
    assert told["layout"] == told["config"]["layout"]
    assert {"unisono/training/loop.py", "unisono/config/schema/run.py"} <= told["code"].keys()
    assert told["machine"]["device"] == "cpu"
    assert {"torch", "python"} <= told["versions"].keys()


# with a checkpoint --------------------------------------------------------------------------------------------------


def differences(there: dict[str, Any], **groups: Any) -> provenance.ProvenanceDifference:
    here = configuration(**groups)
    return provenance.compare(there, provenance.describe_run(here, {"rows": 27}, ProcessInfo()), here, random=False)


def test_a_key_that_did_not_exist_then_is_no_change_where_it_has_its_default() -> None:
    there = provenance.describe_run(configuration(), {"rows": 27}, ProcessInfo())
    del there["config"]["checkpoint"]["final"]
    del there["config"]["data"]["window"]
    assert differences(there).lines() == []
    assert differences(there, data={"window": 3, "shuffle": "blocks"}).mathematics["data.window"] == (None, 3)


def test_what_belongs_to_a_start_is_no_change() -> None:
    there = provenance.describe_run(
        configuration(run={"name": "a", "resume": "must", "allow_change": ["optim.lr"]}), None, ProcessInfo()
    )
    assert differences(there, run={"name": "b"}).lines() == []


def test_what_is_not_known_is_not_compared() -> None:
    there = provenance.describe_run(configuration())
    assert there["environment"] is None
    assert there["machine"] is None
    assert differences(there) == provenance.ProvenanceDifference()


def test_many_entries_are_cut_short() -> None:
    there = provenance.describe_run(configuration(), None, ProcessInfo())
    there["code"] = {**there["code"], **{f"gone{number}.py": "0" for number in range(20)}}
    lines = differences(there).lines()
    assert len(lines) == 9
    assert lines[0] == "code: gone0.py is gone"
    assert lines[-1] == "code: and 12 more"


@pytest.mark.parametrize(
    ("name", "told"),
    [("optim.lrr", "did you mean 'optim.lr'?"), ("lr", "did you mean 'optim.lr'?"), ("moon", "valid here: ")],
)
def test_a_name_in_allow_change_that_is_no_key_is_refused_with_the_nearest(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        provenance.check_names(configuration(run={"name": "a", "allow_change": ["run.seed", name]}))
    assert str(caught.value).startswith(f"run.allow_change: there is no key '{name}'; ")
    assert told in str(caught.value)


def test_a_name_of_a_key_that_only_the_run_had_is_known() -> None:
    config = configuration(run={"name": "a", "allow_change": ["schedules.lr.kind"]})
    provenance.check_names(config, {"schedules": {"lr": {"kind": "linear"}}})
