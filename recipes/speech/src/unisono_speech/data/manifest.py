"""Conversations as messages: a JSON list, JSONL, or ms-swift's JSONL with `<audio>` in its texts.

`{"messages": [{"role", "content": text or [{"type": "text", "text"}, {"type": "audio", "audio_url"}]}], "start_index",
"speaker"}`; ms-swift: `{"messages": [{"role", "content": "… <audio> …"}], "audios": [file, …]}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_speech.data import samples, tokens
from unisono_speech.data.samples import Clip, Conversation, FaultError, Message
from unisono_speech.settings import Manifest

_PLACE = "<audio>"
_URLS = ("audio_url", "url", "path", "audio")


def read(config: Manifest) -> list[Conversation]:
    """The conversations of a manifest, every recording looked for; errors name file, sample and field."""
    entries = _entries(config.path)
    faults, made = [], []
    for number, entry in enumerate(entries):
        try:
            made.append(_conversation(entry, config, f"{config.path}, sample {number}"))
        except FaultError as fault:
            faults.append(f"sample {number}, {fault}")
    samples.refuse(str(config.path), faults, len(entries))
    return made


def _entries(path: Path) -> list[Any]:
    if not path.is_file():
        raise DataError(f"data.path: {path} is not a file; a manifest in JSON or JSONL is needed")
    text = safe_paths.read_regular(path).decode("utf-8")
    if path.suffix.lower() == ".jsonl":
        found: Any = []
        for number, line in enumerate(text.split("\n"), 1):  # splitlines cuts at U+2028, too, which JSON may contain
            if line.strip():
                try:
                    found.append(safe_paths.parse_json(line, Any))
                except ValueError as error:
                    raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    else:
        try:
            found = safe_paths.parse_json(text, Any)  # every sample is checked by itself
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}; a manifest of lines needs the ending .jsonl") from error
        found = found.get("samples") if isinstance(found, dict) else found
    if not isinstance(found, list) or not found:
        raise DataError(f"{path}: a list of at least one sample is needed")
    return found


def _conversation(entry: Any, config: Manifest, name: str) -> Conversation:
    if not isinstance(entry, dict) or not isinstance(entry.get("messages"), list) or not entry["messages"]:
        raise FaultError("messages: a list of messages is needed")
    audios = entry.get("audios")  # of ms-swift
    if audios is not None and not isinstance(audios, list):
        raise FaultError("audios: a list of files is needed")
    left = None if audios is None else list(audios)
    messages = [_message(message, number, config, name, left) for number, message in enumerate(entry["messages"])]
    if audios and left:
        raise FaultError(f"audios: {len(audios)} files for {len(audios) - len(left)} places {_PLACE} in the messages")
    start = entry.get("start_index", 0)
    if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start < len(messages):
        raise FaultError(f"start_index: {start} is not a message's number, 0 to {len(messages) - 1}")
    made = Conversation(name, tuple(messages), start, str(entry.get("speaker") or ""))
    if all(message.role != "assistant" for message in messages[start:]):
        raise FaultError(f"start_index: {start} leaves no message of the assistant to learn")
    for clip in made.references:
        if any(samples.same_recording(clip, target) for target in made.targets):
            raise FaultError(f"messages: {clip.path} is a reference and the target at once; name another reference")
    return made


def _message(message: Any, number: int, config: Manifest, name: str, audios: list[Any] | None) -> Message:
    field = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in samples.ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise FaultError(f"{field}.role: {role!r} is none of {', '.join(samples.ROLES)}")
    content = message.get("content")
    parts: list[str | Clip] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type") == "audio":
            parts.append(_clip(next((part[key] for key in _URLS if part.get(key)), None), config, name, field))
            continue
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise FaultError(f"{field}.content: text, or a list of text and audio, is needed")
        if isinstance(content, list) and not text.strip():
            raise FaultError(f"{field}.content: a text is empty")
        if audios is None and _PLACE in text:
            raise FaultError(f"audios: is missing, and {field} has a place {_PLACE}")
        for place, said in enumerate([text] if audios is None else text.split(_PLACE)):
            if place:
                if not audios:
                    raise FaultError(f"audios: there are more places {_PLACE} in the messages than files")
                parts.append(_clip(audios.pop(0), config, name, "audios"))
            if said.strip():
                parts.append(_check_text(said, message["role"], field))
    if not parts:
        raise FaultError(f"{field}.content: is empty")
    return Message(message["role"], tuple(parts))


def _check_text(text: str, role: str, field: str) -> str:
    plain = text
    if role == "system":
        for token in (tokens.SCENE, tokens.SCENE_END):  # which a system's message may have
            plain = plain.replace(token, "")
    fault = samples.text_fault(plain or "x")
    if fault is not None:
        raise FaultError(f"{field}.content: {fault}")
    return text


def _clip(place: Any, config: Manifest, name: str, field: str) -> Clip:
    if isinstance(place, dict):
        place = place.get("url")
    if not isinstance(place, str) or not place:
        raise FaultError(f"{field}: a recording without a file")
    if "://" in place:
        raise FaultError(f"{field}: {place} is a URL; only local files are read")
    path = (config.root or config.path.parent) / place  # an absolute place stays as it is
    if not path.is_file():
        raise FaultError(f"{field}: {path} does not exist")
    return samples.open_recording(f"{name}, {place}", path, field, config.max_seconds)
