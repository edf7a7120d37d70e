"""Whole runs with packed rows: the same losses on any number of processes, and after an interruption on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import configuration
from recipes.language.tests.corpora import corpus, model, overrides, sentences, write_jsonl
from unisono.launch import train
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Source
from unisono_language.settings import LanguageConfig
from unisono_language.task import Language

STEPS = 8


class OnTheFly(Language):
    """The same documents, from a source that does not know how long they are."""

    def data(self) -> Source:
        rows = super().data()
        return [rows[row] for row in range(len(rows))]


def part(
    place: ProcessInfo, group: Communicator, texts: Path, folder: Path, updates: int, known: bool = True
) -> tuple[int, list[float]]:
    """Go on with the run in this folder for some updates: where it went on, and their losses."""
    data = corpus(texts, packing={"chunk": 6, "open_bins": 3}, lanes=6)
    kind = Language if known else OnTheFly
    task = kind(LanguageConfig(sequence=40, pad_to_multiple=4), model=model("llama"), data=data)
    how = configuration(
        layout={"strategy": "ddp" if place.world_size > 1 else "single", "world_size": place.world_size},
        train={"steps": STEPS, "global_batch": 12, "precision": "fp64"},
        optim={"kind": "adamw", "lr": 1e-2},
        checkpoint={"every": 1},
        eval={"at_end": False},
    ).model_copy(update={"data": data})
    with runs.training(task, how, place, group, folder) as training:
        return training.first, [result.loss for _, result in zip(range(updates), training.steps(), strict=False)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_jsonl(folder / "a.jsonl", sentences(60))
    return folder


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing interrupted, on one process."""
    losses = processes.alone(part, texts, tmp_path_factory.mktemp("whole"), STEPS)[1]
    assert len(losses) == STEPS
    return losses  # type: ignore[no-any-return]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("after", [1, 5])
def test_an_interrupted_run_goes_on_with_the_same_losses(
    texts: Path, whole: list[float], tmp_path: Path, after: int, known: bool
) -> None:
    first = processes.alone(part, texts, tmp_path, after, known)
    second = processes.alone(part, texts, tmp_path, STEPS, known)
    assert (first[0], second[0]) == (0, after)
    assert first[1] + second[1] == whole


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 1), (3, 2)])
def test_an_interrupted_run_goes_on_with_the_same_losses_on_another_number_of_processes(
    texts: Path, whole: list[float], tmp_path: Path, worlds: tuple[int, int]
) -> None:
    first = processes.run(part, worlds[0], texts, tmp_path, 3)[0]
    second = processes.run(part, worlds[1], texts, tmp_path, STEPS)[0]
    assert (first[0], second[0]) == (0, 3)
    assert first[1] + second[1] == pytest.approx(whole, rel=1e-12)


# from the command line ------------------------------------------------------------------------------------------------


def _losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events.step_events(events.read_events(folder / "events.jsonl"))]


def _train(texts: Path, runs: Path, **more: Any) -> list[float]:
    train.train("language", overrides(texts, runs, **{"data.vocab_size": 300, **more}))
    return _losses(runs / "run")


def test_a_run_is_packed_from_the_command_line(texts: Path, tmp_path: Path) -> None:
    plain = _train(texts, tmp_path / "plain")
    packed = _train(texts, tmp_path / "packed", **{"data.packing": {}})
    longer = _train(texts, tmp_path / "longer", **{"data.packing.length": 32})
    assert len(plain) == len(packed) == len(longer) == 2
    assert len({plain[0], packed[0], longer[0]}) == 3
