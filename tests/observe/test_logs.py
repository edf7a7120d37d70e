"""A log file for every rank, and warnings of rank 0 on the console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.observe import logs
from unisono.runtime.communicator import ProcessInfo

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


def test_every_rank_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        logs.start_logging(tmp_path, ProcessInfo(rank, 16))
        log.info("here is %d", rank)
        logs.stop_logging()
    assert files(tmp_path) == {
        "rank-00000.log": ["rank 0 INFO unisono.test: here is 0"],
        "rank-00001.log": ["rank 1 INFO unisono.test: here is 1"],
        "rank-00012.log": ["rank 12 INFO unisono.test: here is 12"],
    }


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for text in ("before", "after"):
        logs.start_logging(tmp_path, ProcessInfo())
        log.info(text)
        logs.stop_logging()
    assert [line.rpartition(" ")[2] for line in files(tmp_path)["rank-00000.log"]] == ["before", "after"]


def test_information_is_kept_and_details_are_not(tmp_path: Path) -> None:
    logs.start_logging(tmp_path, ProcessInfo())
    log.debug("a detail")
    log.info("information")
    logs.stop_logging()
    assert files(tmp_path)["rank-00000.log"] == ["rank 0 INFO unisono.test: information"]


def test_warnings_of_rank_0_are_on_the_console_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.start_logging(tmp_path, ProcessInfo(0, 2))
    log.info("information")
    log.warning("look")
    assert capsys.readouterr() == ("", "WARNING: look\n")
    logs.stop_logging()
    assert len(files(tmp_path)["rank-00000.log"]) == 2


def test_warnings_of_other_ranks_are_in_their_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.start_logging(tmp_path, ProcessInfo(1, 2))
    log.warning("look")
    assert capsys.readouterr() == ("", "")
    logs.stop_logging()
    assert files(tmp_path)["rank-00001.log"] == ["rank 1 WARNING unisono.test: look"]


def test_other_libraries_are_not_written_down(tmp_path: Path) -> None:
    logs.start_logging(tmp_path, ProcessInfo())
    logging.getLogger("another.library").warning("not ours")
    logs.stop_logging()
    assert files(tmp_path) == {"rank-00000.log": []}


def test_nothing_goes_on_to_the_handlers_of_the_program_around_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs.start_logging(tmp_path, ProcessInfo(1, 2))
    log.warning("inside")
    logs.stop_logging()
    log.warning("outside")
    assert caplog.messages == ["outside"]


def test_stopping_closes_the_file_and_ends_what_is_written(tmp_path: Path) -> None:
    logs.start_logging(tmp_path, ProcessInfo())
    (file,) = (h for h in logging.getLogger("unisono").handlers if isinstance(h, logging.FileHandler))
    logs.stop_logging()
    log.warning("too late")
    assert file.stream is None
    assert files(tmp_path) == {"rank-00000.log": []}


def test_starting_again_closes_what_was_started_before(tmp_path: Path) -> None:
    logs.start_logging(tmp_path / "first", ProcessInfo())
    logs.start_logging(tmp_path / "second", ProcessInfo())
    log.info("here")
    logs.stop_logging()
    assert files(tmp_path / "first") == {"rank-00000.log": []}
    assert len(files(tmp_path / "second")["rank-00000.log"]) == 1


def test_stopping_what_was_not_started_does_nothing() -> None:
    before = list(logging.getLogger("unisono").handlers)
    logs.stop_logging()
    assert logging.getLogger("unisono").handlers == before


def test_stopping_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    logger, own = logging.getLogger("unisono"), logging.NullHandler()
    logger.addHandler(own)
    try:
        before = logger.level, logger.propagate, list(logger.handlers)
        logs.start_logging(tmp_path, ProcessInfo())
        logs.stop_logging()
        assert (logger.level, logger.propagate, logger.handlers) == before
    finally:
        logger.removeHandler(own)
