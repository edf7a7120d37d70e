"""A script's processes have the variables that its library's launcher would set, and those of the command."""

from __future__ import annotations

import os

import pytest
import torch

from unisono.proof.scripts.script_proof import parse_script_settings
from unisono.proof.scripts.start.launch_variables import launch_variables, wants_fabric
from unisono.runtime.errors import ConfigError

LAUNCHERS = ("HYDRA_FULL_ERROR", "ACCELERATE_USE_CPU", "LT_ACCELERATOR", "LT_DEVICES", "LT_CLI_USED")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "BATCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_accelerate_and_fabric_find_the_processes_on_a_cpu_and_hydra_hides_no_error() -> None:
    with launch_variables(2, {}):
        assert [os.environ.get(name) for name in LAUNCHERS] == ["1", "true", "cpu", "2", None]
    with launch_variables(2, {}, by_fabric=True):
        assert os.environ["LT_CLI_USED"] == "1"
    assert not any(name in os.environ for name in LAUNCHERS)


def test_what_the_user_has_set_stays_and_what_the_command_sets_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_DEVICES", "4")
    monkeypatch.setenv("BATCH", "1")
    with launch_variables(2, {"BATCH": "8"}):
        assert (os.environ["LT_DEVICES"], os.environ["BATCH"]) == ("4", "8")
    assert os.environ["BATCH"] == "1"


def test_a_fabric_that_was_not_launched_is_known_by_its_error() -> None:
    assert wants_fabric(RuntimeError("To use Fabric with more than one device, call `.launch()` or use `fabric run …`"))
    assert not wants_fabric(RuntimeError("Address already in use"))


def test_variables_are_settings_of_a_proof() -> None:
    settings = parse_script_settings(["env.BATCH={16/world}", "worlds=[1,2]", "env.OUT=a=b"])
    assert settings.env == {"BATCH": "{16/world}", "OUT": "a=b"}
    for word, said in (
        ("env.2=3", "'env.2=…' names no variable"),
        ("env=3", "names no variable"),
        ("env.BATCH", "not a setting"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_script_settings([word])
