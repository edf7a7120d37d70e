"""A log file for every rank, and warnings of rank 0 on the console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.observe import logs
from unisono.runtime.communication.communicator import ProcessInfo

log = logging.getLogger("unisono.test")


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    logs.stop_logging()


def files(run: Path) -> dict[str, list[str]]:
    """The messages in each log file, without their time."""
    return {
        path.name: [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
        for path in sorted((run / "logs").iterdir())
    }


def test_every_rank_goes_on_in_a_file_of_its_own_without_details_and_the_first_warns_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, text in ((0, "before"), (12, "before"), (0, "after")):
        logs.start_logging(tmp_path, ProcessInfo(rank, 16))
        log.debug("a detail")
        log.info(text)
        log.warning("look")
        logs.stop_logging()
        assert capsys.readouterr() == ("", "" if rank else "WARNING: look\n")
    first = ["rank 0 INFO unisono.test: before", "rank 0 WARNING unisono.test: look"]
    assert files(tmp_path) == {
        "rank-00000.log": [*first, first[0].replace("before", "after"), first[1]],
        "rank-00012.log": ["rank 12 INFO unisono.test: before", "rank 12 WARNING unisono.test: look"],
    }


def test_the_file_has_what_is_logged_by_unisono_and_other_handlers_have_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs.start_logging(tmp_path, ProcessInfo(1, 2))
    logging.getLogger("another.library").warning("not ours")
    log.warning("inside")
    logs.stop_logging()
    log.warning("outside")
    assert caplog.messages == ["not ours", "outside"]
    assert files(tmp_path) == {"rank-00001.log": ["rank 1 WARNING unisono.test: inside"]}


def test_starting_again_and_stopping_close_the_file_that_was_open(tmp_path: Path) -> None:
    opened = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.start_logging(tmp_path / name, ProcessInfo())
        opened += [h for h in logging.getLogger("unisono").handlers if isinstance(h, logs._FileHandler)]
    log.info("here")
    logs.stop_logging()
    log.warning("too late")
    assert [file.stream.closed for file in opened] == [True, True]
    assert [len(files(tmp_path / name)["rank-00000.log"]) for name in ("first", "second")] == [0, 1]


def test_stopping_leaves_the_logger_as_it_was_even_if_nothing_was_started(tmp_path: Path) -> None:
    logger, own = logging.getLogger("unisono"), logging.NullHandler()
    logger.addHandler(own)
    try:
        before = logger.level, logger.propagate, list(logger.handlers)
        logs.stop_logging()
        assert (logger.level, logger.propagate, logger.handlers) == before
        logs.start_logging(tmp_path, ProcessInfo())
        logs.stop_logging()
        assert (logger.level, logger.propagate, logger.handlers) == before
    finally:
        logger.removeHandler(own)


def test_in_a_proof_each_warning_of_rank_0_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("unisono")
    before, propagated = list(logger.handlers), logger.propagate
    try:
        logs.warn_once(ProcessInfo(rank=1, world_size=2))
        logger.warning("of rank 1")
        assert capsys.readouterr().err == ""
        logs.warn_once(ProcessInfo())
        for text in ("one", "two", "one"):
            logger.warning(text)
        assert capsys.readouterr().err == "WARNING: one\nWARNING: two\n"
    finally:
        logger.handlers, logger.propagate = before, propagated
