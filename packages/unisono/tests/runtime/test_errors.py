from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime import errors
from unisono.runtime.errors import nearest

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UnisonoError)]


def test_every_error_is_a_value_error_that_the_user_can_catch_at_once():
    assert all(issubclass(kind, errors.UnisonoError) and issubclass(errors.UnisonoError, ValueError) for kind in KINDS)


EXIT_CODES = {
    errors.CallbackError: 1, errors.UnisonoError: 2,
    errors.ConfigError: 2, errors.KernelError: 2, errors.DataError: 2, errors.BadSamplesError: 2, errors.RunError: 2,
    errors.UnavailableError: 2, errors.CheckpointError: 2, errors.FormatError: 2,
    errors.NonFiniteError: 3, errors.SpikeError: 3,
    errors.GuardError: 4, errors.DeadlineError: 5, errors.MemoryExhaustedError: 6,
    errors.SaveError: 7, errors.RecordError: 7, errors.UploadError: 7,
    errors.DesyncError: 8, errors.LostError: 9, errors.StuckError: 10, errors.Preempted: 75,
}  # fmt: skip


def test_a_script_can_tell_faults_apart_by_the_exit_code_of_every_error():
    assert {kind: kind.exit_code for kind in KINDS} == EXIT_CODES


def test_an_error_tells_its_fault_on_every_side_of_a_pipe():
    error = pickle.loads(pickle.dumps(errors.GuardError("replicas differ", fault="Replicas drift apart")))
    assert (str(error), error.fault) == ("replicas differ", "Replicas drift apart")
    assert errors.NonFiniteError("no").fault == "Numbers that are not finite"
    assert errors.DataError("no").fault == ""


def test_a_close_name_is_suggested():
    assert nearest("learnin_rate", ["learning_rate", "momentum"]) == "did you mean 'learning_rate'?"


def test_without_a_close_name_all_names_are_listed_in_order():
    assert nearest("zzz", ["lr", "betas", "lr"]) == "valid here: betas, lr"


def test_where_no_name_is_valid_the_sentence_says_so():
    assert nearest("zzz", []) == "and there is none to choose from"


@given(st.lists(st.text("abcdef_", min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_name_that_exists_is_the_nearest_to_itself(names: list[str]):
    assert nearest(names[0], names) == f"did you mean '{names[0]}'?"
