"""Folders and manifests: what is read, and what is refused by file, sample and field."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path
from typing import Any

import pytest

from recipes.speech.tests import made
from unisono import DataError
from unisono_speech.data import folder, manifest
from unisono_speech.data.library import Library
from unisono_speech.data.samples import Clip
from unisono_speech.settings import Embedded, Folder, Manifest


def read(path: Path, **settings: Any) -> Any:
    return folder.read(Folder(kind="folder", path=path, **settings))


def test_a_folder_says_who_speaks_what(tmp_path: Path) -> None:
    found = read(made.folder(tmp_path / "data"))
    assert len(found) == 6
    assert found[0].speaker == "voice 0" and found[0].scene == "quiet room" and found[0].cloning
    assert found[0].clip.path == tmp_path / "data" / "0_0.wav"


def test_each_kind_of_task_has_its_prompt(tmp_path: Path) -> None:
    path = made.folder(tmp_path / "data")
    made.changed(path, 0, task_type="single_speaker_smart_voice")
    made.changed(path, 1, task_type="zero_shot_voice_cloning", ref_audio_file="0_2.wav")
    made.changed(path, 2, task_type="multi_speaker_voice_cloning", ref_audio_file=["0_0.wav", "1_0.wav"])
    made.changed(path, 3, task_type="multi_speaker_smart_voice", transcript="[SPEAKER0] ba [SPEAKER1] to")
    smart, cloned, several, both = read(path)[:4]
    assert not smart.references and not smart.cloning and not both.references
    assert [message.role for message in smart.conversation(()).messages] == ["system", "user", "assistant"]
    talk = cloned.conversation(cloned.references)
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.start == 4 and talk.targets == [cloned.clip]
    tags = [message.parts[0] for message in several.conversation(several.references).messages if message.role == "user"]
    assert tags[0].startswith("[SPEAKER0] ") and tags[1].startswith("[SPEAKER1] ")
    assert both.text == "[SPEAKER0] ba [SPEAKER1] to"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"audio_file": None}, "sample 1 (0_1), audio_file: is missing"),
        ({"audio_file": "gone.wav"}, "gone.wav is no file of the folder"),
        ({"audio_file": "../0_0.wav"}, "is no file of the folder"),
        ({"audio_file": "0_1.txt"}, "audio_file: "),
        ({"transcript_file": None}, "transcript_file: is missing, and so is transcript"),
        ({"transcript": " "}, "transcript: is empty"),
        ({"transcript": "say <|eot_id|>"}, "begins a control token"),
        ({"sample_rate": 16000}, "sample_rate: 16000, but 0_1.wav has 8000 Hz"),
        ({"ref_audio_file": "0_1.wav"}, "ref_audio_file: is the recording that is to be learned"),
        (
            {"ref_audio_file": "copy.wav", "ref_transcript": "x"},
            "ref_audio_file: is the recording that is to be learned",
        ),
        ({"task_type": "singing"}, "task_type: 'singing' is none of zero_shot_voice_cloning"),
        ({"task_type": "multi_speaker_voice_cloning"}, "several voices need a list of recordings"),
        ({"speaker_id": "lone", "task_type": "zero_shot_voice_cloning"}, "speaker_id=lone has no other recording"),
    ],
)
def test_a_bad_entry_is_named_by_file_sample_and_field(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    path = made.folder(tmp_path / "data")
    (path / "copy.wav").write_bytes((path / "0_1.wav").read_bytes())
    made.changed(path, 1, **fields)
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        read(path)
    assert str(path / "metadata.json") in str(caught.value) and "1 of 6 samples" in str(caught.value)


def test_a_long_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"more than data\.max_seconds=0\.1 \(and|more than data.max_seconds=0.1"):
        read(made.folder(tmp_path / "data"), max_seconds=0.1)


def test_a_speaker_with_no_recording_left_to_train_on_is_refused(tmp_path: Path) -> None:
    path = made.folder(tmp_path / "data", speakers=2, clips=2)
    with pytest.raises(DataError, match="has no other recording to train on"):
        Library(Folder(kind="folder", path=path, held_out=0.5))


def entries(path: Path) -> list[dict[str, Any]]:
    made.folder(path)
    return [
        {
            "messages": [
                {"role": "system", "content": "Speak.\n<|scene_desc_start|>\nA room.\n<|scene_desc_end|>"},
                {"role": "user", "content": "ba"},
                {"role": "assistant", "content": [{"type": "audio", "audio_url": "0_0.wav"}]},
                {"role": "user", "content": [{"type": "text", "text": "to"}]},
                {"role": "assistant", "content": [{"type": "audio", "audio_url": f"0_{n}.wav"}]},
            ],
            "start_index": 3,
            "speaker": "voice 0",
        }
        for n in (1, 2)
    ]


def write(path: Path, found: list[dict[str, Any]], name: str = "m.json") -> Path:
    text = "\n".join(map(json.dumps, found)) if name.endswith("l") else json.dumps(found)
    (path / name).write_text(text, encoding="utf-8")
    return path / name


@pytest.mark.parametrize("name", ["m.json", "m.jsonl"])
def test_a_manifest_says_the_messages(tmp_path: Path, name: str) -> None:
    found = manifest.read(Manifest(kind="manifest", path=write(tmp_path, entries(tmp_path), name)))
    assert len(found) == 2 and found[0].speaker == "voice 0" and found[0].start == 3
    assert [clip.path for clip in found[0].targets] == [tmp_path / "0_1.wav"]
    assert len(found[0].clips) == 2


def test_the_lines_of_ms_swift_are_read(tmp_path: Path) -> None:
    made.folder(tmp_path)
    line = {
        "messages": [
            {"role": "user", "content": "Say it like <audio>: ba"},
            {"role": "assistant", "content": "<audio>"},
        ],
        "audios": ["0_0.wav", "0_1.wav"],
    }
    [found] = manifest.read(Manifest(kind="manifest", path=write(tmp_path, [line], "m.jsonl")))
    before, clip, after = found.messages[0].parts
    assert before == "Say it like " and after == ": ba" and isinstance(clip, Clip)
    assert [target.path for target in found.targets] == [tmp_path / "0_1.wav"]
    line["audios"].append("0_2.wav")
    with pytest.raises(DataError, match="3 files for 2 places"):
        manifest.read(Manifest(kind="manifest", path=write(tmp_path, [line], "m.jsonl")))
    line["audios"] = ["0_0.wav"]
    with pytest.raises(DataError, match="more places <audio> in the messages than files"):
        manifest.read(Manifest(kind="manifest", path=write(tmp_path, [line], "m.jsonl")))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"start_index": 9}, "sample 1, start_index: 9 is not a message's number, 0 to 4"),
        ({"start_index": "3"}, "start_index: 3 is not"),
        ({"messages": []}, "messages: a list of messages is needed"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": " "}]}], "start_index": 0},
            "messages[0].content: a text is empty",
        ),
        (
            {"messages": [{"role": "assistant", "content": "<audio>"}], "start_index": 0},
            "audios: is missing, and messages[0] has a place <audio>",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "start_index": 0}, "leaves no message of the assistant"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: 'robot' is none of system"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content: is empty"),
        ({"messages": [{"role": "user", "content": "a <|eot_id|>"}]}, "begins a control token"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "audio", "audio_url": "no.wav"}]}]},
            "no.wav does not exist",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "audio", "audio_url": "http://a/b.wav"}]}]},
            "is a URL; only local files are read",
        ),
    ],
)
def test_a_bad_conversation_is_named_by_file_sample_and_field(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    found = entries(tmp_path)
    found[1] |= change
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        manifest.read(Manifest(kind="manifest", path=write(tmp_path, found)))
    assert str(tmp_path / "m.json") in str(caught.value)


def test_a_reference_that_is_the_target_is_refused(tmp_path: Path) -> None:
    found = entries(tmp_path)
    found[0]["messages"][4]["content"][0]["audio_url"] = "0_0.wav"
    with pytest.raises(DataError, match="a reference and the target at once"):
        manifest.read(Manifest(kind="manifest", path=write(tmp_path, found)))


def test_a_recording_may_be_learned_and_another_be_heard_after_it(tmp_path: Path) -> None:
    """References are the recordings that are not learned, wherever they stand."""
    found = entries(tmp_path)[:1]
    heard = {"role": "user", "content": [{"type": "audio", "audio_url": "1_0.wav"}]}
    found[0]["messages"].insert(3, heard)
    found[0]["start_index"] = 1
    [read_again] = manifest.read(Manifest(kind="manifest", path=write(tmp_path, found)))
    assert [clip.path.name for clip in read_again.targets] == ["0_0.wav", "0_1.wav"]
    assert [clip.path.name for clip in read_again.references] == ["1_0.wav"]
    heard["content"][0]["audio_url"] = "0_1.wav"
    with pytest.raises(DataError, match=r"0_1\.wav is a reference and the target at once"):
        manifest.read(Manifest(kind="manifest", path=write(tmp_path, found)))


def test_a_text_may_hold_a_line_separator(tmp_path: Path) -> None:
    found = entries(tmp_path)
    found[0]["messages"][1]["content"] = "ba\u2028to\x85do"
    lines = "\r\n".join(json.dumps(one, ensure_ascii=False) for one in found)
    (tmp_path / "m.jsonl").write_text(lines, encoding="utf-8", newline="")
    made_of = manifest.read(Manifest(kind="manifest", path=tmp_path / "m.jsonl"))
    assert len(made_of) == 2 and made_of[0].messages[1].parts == ("ba\u2028to\x85do",)


def test_a_recording_without_samples_is_refused(tmp_path: Path) -> None:
    path = made.folder(tmp_path / "data")
    with wave.open(str(path / "0_1.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
    with pytest.raises(DataError, match=r"sample 1 \(0_1\), audio_file: .*0_1\.wav"):
        read(path)


@pytest.mark.parametrize("kind", ["embedded", "manifest"])
def test_a_task_that_data_cannot_have_is_refused(tmp_path: Path, kind: str) -> None:
    chosen: Any = {"embedded": Embedded, "manifest": Manifest}[kind]
    more = {"path": tmp_path} if kind == "manifest" else {}
    with pytest.raises(ValueError, match=r"data\.task=multi_speaker_voice_cloning"):
        chosen(kind=kind, task="multi_speaker_voice_cloning", **more)


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        manifest.read(Manifest(kind="manifest", path=tmp_path))
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        manifest.read(Manifest(kind="manifest", path=tmp_path / "m.json"))
