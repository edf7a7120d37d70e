"""What torchrun and Slurm put into the environment, read and completed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.launch.cluster import RUN_ID_VARIABLE, meeting_point, process_info, set_rendezvous_variables
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


def completed(**variables: str) -> dict[str, str]:
    environment = {**SLURM, **variables}
    found = process_info(environment)
    assert found is not None
    set_rendezvous_variables(found, environment)
    return environment


RUN_ID = "TORCHELASTIC_RUN_ID"


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        pytest.param({}, None, id="no variables"),
        pytest.param({"PATH": "/bin", "MASTER_ADDR": "a"}, None, id="unrelated variables"),
        pytest.param(TORCHRUN, "torchrun", id="torchrun"),
        pytest.param({**TORCHRUN, RUN_ID: "job"}, "torchrun", id="torchrun with a run id"),
        pytest.param({**TORCHRUN, RUN_ID: "unisono-77"}, "torchrun", id="torchrun with a run id like ours"),
        pytest.param({**TORCHRUN, RUN_ID_VARIABLE: "unisono-77", RUN_ID: "unisono-77"}, "unisono", id="ours"),
        pytest.param(
            {**TORCHRUN, RUN_ID_VARIABLE: "unisono-77", RUN_ID: "unisono-78"}, "torchrun", id="inside of ours"
        ),
        pytest.param({**TORCHRUN, RUN_ID_VARIABLE: "unisono-77"}, "torchrun", id="without an id, inside of ours"),
        pytest.param({**SLURM, **TORCHRUN}, "torchrun", id="torchrun inside of Slurm"),
        pytest.param(SLURM, "slurm", id="Slurm"),
        pytest.param({**SLURM, "SLURM_NTASKS": "99"}, "slurm", id="the step's number of tasks counts, not the job's"),
    ],
)
def test_a_process_knows_its_place_and_who_launched_it(variables: dict[str, str], launcher: str | None):
    assert process_info(variables) == (None if launcher is None else ProcessInfo(3, 4, 1, 2, launcher))


# torchrun -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing",
    ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"],
)
def test_torchrun_s_variables_in_part_are_refused_with_all_that_are_missing(missing: str):
    with pytest.raises(ConfigError, match=f"not {missing}; set all of them or none"):
        process_info({key: value for key, value in TORCHRUN.items() if key not in missing.split(", ")})


def test_torchrun_s_address_is_left_as_it_is():
    environment = dict(TORCHRUN)
    set_rendezvous_variables(ProcessInfo(3, 4, 1, 2, "torchrun"), environment)
    assert environment == TORCHRUN


def test_processes_without_torch_meet_beside_the_port_that_torchrun_itself_listens_on():
    assert meeting_point(TORCHRUN) == ("a", 1)
    agent = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    (first, again), others = [meeting_point(agent)[1] for _ in range(2)], {"UNISONO_TOKEN": "t", "MASTER_PORT": "2"}
    assert first == again and 20000 <= first < 32000
    assert first not in {meeting_point({**agent, name: value})[1] for name, value in others.items()}
    assert meeting_point({**agent, "TORCHELASTIC_RESTART_COUNT": "1"})[1] != first


# Slurm --------------------------------------------------------------------------------------------------------------


def test_a_batch_script_is_no_process_of_a_step():
    batch = {key: value for key, value in SLURM.items() if "STEP" not in key}
    assert process_info({**batch, "SLURM_NTASKS": "4"}) is None


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
@example([16] * 10)  # "16(x10)"
def test_the_tasks_of_each_host_are_read_from_slurm_s_short_form(tasks: list[int]):
    runs: list[list[int]] = []
    for count in tasks:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    found = [
        process_info({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)})
        for node in range(len(tasks))
    ]
    assert [where.local_world_size for where in found if where] == tasks


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("gpu[7,9-12]", "gpu7"),
        ("a-[1,3]-x", "a-1-x"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("c1-b2.site.org", "c1-b2.site.org"),
    ],
)
def test_the_first_host_of_a_step_is_where_its_processes_meet(nodes: str, first: str):
    assert completed(SLURM_STEP_NODELIST=nodes)["MASTER_ADDR"] == first


A, B, STEP, JOB = {"UNISONO_TOKEN": "a"}, {"UNISONO_TOKEN": "b"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}


def test_all_processes_of_a_step_agree_on_the_port_and_others_do_not_know_it():
    steps: list[dict[str, str]] = [{}, STEP, JOB, A, B, {**A, **STEP}, {**A, **JOB}]
    ports = [{completed(SLURM_PROCID=str(rank), **step)["MASTER_PORT"] for rank in range(4)} for step in steps]
    assert {len(found) for found in ports} == {1} and len(set.union(*ports)) == len(steps)


@given(st.integers(1, 2**31), st.integers(0, 1000), st.text())
def test_a_port_is_below_those_that_a_system_gives_away(job: int, step: int, token: str):
    variables = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "UNISONO_TOKEN": token}
    assert 20000 <= int(completed(**variables)["MASTER_PORT"]) < 32000


def test_an_address_that_the_user_has_set_is_kept():
    found = completed(MASTER_ADDR="mine", MASTER_PORT="5")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("mine", "5")
