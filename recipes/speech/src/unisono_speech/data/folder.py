"""A folder of recordings with a `metadata.json`: who speaks, what, and in which recording.

`{"samples": [{"id", "audio_file", "transcript_file" or "transcript", "speaker_id", "scene", "task_type",
"ref_audio_file", "ref_transcript_file" or "ref_transcript", "sample_rate"}]}`, of which the recording and its text are
needed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, get_args

from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_speech.data import samples
from unisono_speech.data.samples import Clip, FaultError, Utterance
from unisono_speech.settings import Folder, Kind

METADATA = "metadata.json"
_KINDS = get_args(Kind)
_PLAIN = {"audio_generation"}  # says nothing of references


def read(config: Folder) -> list[Utterance]:
    """The utterances of a folder, every file looked for; errors name file, sample and field."""
    folder = config.path
    where = str(folder / METADATA)
    if not folder.is_dir():
        raise DataError(f"data.path: {folder} is not a directory; a folder with {METADATA} and recordings is needed")
    try:
        found = safe_paths.read_json(folder, METADATA, dict[str, Any], 1 << 30)
    except FileNotFoundError as error:
        raise DataError(f"data.path: {folder} has no {METADATA}; write one, or use data=manifest") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error
    entries = found.get("samples")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}: 'samples' must be a non-empty list")
    voices = Counter(str(entry.get("speaker_id", "")) for entry in entries if isinstance(entry, dict))
    faults, made = [], []
    texts: dict[str, str] = {}
    for number, entry in enumerate(entries):
        name = f"sample {number} ({entry.get('id', 'no id')})" if isinstance(entry, dict) else f"sample {number}"
        try:
            made.append(_utterance(config, entry, f"{where}, {name}", voices, texts))
        except FaultError as fault:
            faults.append(f"{name}, {fault}")
        except OSError as error:
            faults.append(f"{name}: {error}")
    samples.refuse(where, faults, len(entries))
    return made


def _utterance(config: Folder, entry: Any, name: str, voices: Counter[str], texts: dict[str, str]) -> Utterance:
    if not isinstance(entry, dict):
        raise FaultError(f"entry: is {type(entry).__name__}, not an object")
    clip = _clip(config, "audio_file", entry.get("audio_file"), name, entry.get("sample_rate"))
    said = _text(config.path, entry, "transcript", "transcript_file")
    texts[str(entry["audio_file"])] = said
    speaker = str(entry.get("speaker_id", ""))
    kind = entry.get("task_type") or "auto"
    if kind not in _KINDS and kind not in _PLAIN and kind != "auto":
        raise FaultError(f"task_type: '{kind}' is none of {', '.join(_KINDS)}")
    kind = config.task if kind in _PLAIN or kind == "auto" else kind
    references = _references(config, entry, clip, name, texts)
    if kind == "auto":
        kind = "zero_shot_voice_cloning" if references or voices[speaker] > 1 else "single_speaker_smart_voice"
    if kind.endswith("smart_voice"):
        references = ()
    elif kind == "multi_speaker_voice_cloning" and len(references) < 2:
        raise FaultError("ref_audio_file: several voices need a list of recordings, one for each")
    elif not references and voices[speaker] < 2:
        raise FaultError(f"ref_audio_file: is missing, and speaker_id={speaker or 'none'} has no other recording")
    scene = str(entry.get("scene") or "")
    if samples.CONTROL in scene:
        raise FaultError(f"scene: contains '{samples.CONTROL}', which begins a control token of the prompt")
    cloning = kind == "zero_shot_voice_cloning"
    return Utterance(name, said, clip, speaker, scene.replace("_", " "), references, cloning)


def _references(
    config: Folder, entry: dict[str, Any], target: Clip, name: str, texts: dict[str, str]
) -> tuple[tuple[str, Clip], ...]:
    given = entry.get("ref_audio_file")
    if not given:
        return ()
    files = given if isinstance(given, list) else [given]
    made = []
    for number, file in enumerate(files):
        clip = _clip(config, "ref_audio_file", file, name)
        if samples.same_recording(clip, target):
            raise FaultError("ref_audio_file: is the recording that is to be learned (audio_file); name another one")
        one = {
            key: (value[number] if isinstance(value, list) and number < len(value) else value)
            for key, value in entry.items()
            if key in ("ref_transcript", "ref_transcript_file")
        }
        if not one and file in texts:
            made.append((texts[file], clip))
            continue
        one.setdefault("ref_transcript_file", str(Path(file).with_suffix(".txt")))
        made.append((_text(config.path, one, "ref_transcript", "ref_transcript_file"), clip))
    return tuple(made)


def _clip(config: Folder, field: str, file: Any, name: str, rate: Any = None) -> Clip:
    if not isinstance(file, str) or not file:
        raise FaultError(f"{field}: is missing")
    if not safe_paths.is_inside(config.path, file):
        raise FaultError(f"{field}: {config.path / file} is no file of the folder")
    return samples.open_recording(f"{name}, {file}", config.path / file, field, config.max_seconds, rate)


def _text(folder: Path, entry: dict[str, Any], key: str, file_key: str) -> str:
    said = entry.get(key)
    if said is None:
        file = entry.get(file_key)
        if file is None:
            raise FaultError(f"{file_key}: is missing, and so is {key}")
        try:
            said = safe_paths.read_text(folder, file)
        except FileNotFoundError:
            raise FaultError(f"{file_key}: {folder / str(file)} does not exist") from None
        except (OSError, ValueError) as error:
            raise FaultError(f"{file_key}: {error}") from error
        key = file_key
    fault = samples.text_fault(said)
    if fault is not None:
        raise FaultError(f"{key}: {fault}")
    return str(said).strip()
