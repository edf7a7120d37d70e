"""Real recordings, where they are: two folders with a metadata.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.recipes.speech import folder
from unisono.recipes.speech.library import Library
from unisono.recipes.speech.settings import Folder

DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.parametrize(("name", "count"), [("speech_digits", 400), ("speech_ljspeech", 110)])
def test_a_real_folder_is_read(name: str, count: int) -> None:
    path = DATA / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    found = folder.read(Folder(kind="folder", path=path))
    assert len(found) == count and all(
        sample.cloning and sample.text and sample.scene == "quiet room" for sample in found
    )
    assert found[0].text == ("zero" if name == "speech_digits" else found[0].text)


def test_a_speaker_is_held_out() -> None:
    path = DATA / "speech_digits"
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    library = Library(Folder(kind="folder", path=path, split="speaker", held_out_speakers=["jackson"]))
    assert library.facts() == {"samples": 400, "held_out": 100, "speakers": 4}
