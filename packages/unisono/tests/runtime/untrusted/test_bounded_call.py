"""A program of somebody else's ends once it takes more time or memory than it is given, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from unisono.runtime.errors import DataError
from unisono.runtime.untrusted import bounded_call
from unisono.runtime.untrusted.bounded_call import call_bounded


def test_what_is_called_returns_and_raises_as_if_it_were_called_here() -> None:
    assert call_bounded(lambda: (1, "a"), "it") == (1, "a")
    with pytest.raises(KeyError, match="b"):
        call_bounded(lambda: {}["b"], "it")


def test_a_loop_without_an_end_is_ended_even_if_it_catches_every_exception() -> None:
    def work() -> None:
        while True:
            try:
                for _ in range(10**9):
                    pass
            except Exception:
                pass

    with pytest.raises(DataError, match=r"it takes more than 0\.1 s of processor time"):
        call_bounded(work, "it", seconds=0.1)
    assert not [thread for thread in threading.enumerate() if thread.name == "unisono-bounded"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_without_a_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller looked for ever, as after an exception that arrived while the thread noted its last one."""

    def die() -> None:
        raise SystemExit

    monkeypatch.setattr(bounded_call, "_own_clock", die)
    with pytest.raises(DataError, match="it takes more than the memory that there is"):
        call_bounded(lambda: None, "it")


def test_memory_that_doubles_is_noticed() -> None:
    def work() -> Any:
        text = "ab"
        for _ in range(60):
            text += text
            time.sleep(0.02 if len(text) > 1 << 22 else 0)
        return len(text)

    with pytest.raises(DataError, match=r"more than 0\.0625 GiB of memory"):
        call_bounded(work, "it", size=1 << 26)
