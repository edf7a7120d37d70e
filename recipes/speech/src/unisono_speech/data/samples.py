"""What a sample is: messages of text and recordings, and from which message on the assistant's are to be learned.

Folders say who speaks and what; manifests say the messages themselves. Both become a `Conversation`, so prompts and
labels have one origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import unisono_audio as audio
from unisono import DataError
from unisono.recipe_tools import safe_paths
from unisono_speech.data import voices

INSTRUCTION = "Generate audio following instruction."
ROLES = ("system", "user", "assistant")
CONTROL = "<|"  # what begins a control token; a text that has one would speak as the prompt itself


@dataclass(frozen=True)
class Clip:
    """A recording.

    Attributes:
        name: for errors.
        path: of its file; None for one that is synthesised.
        voice: of a synthesised one: speaker, text and take.
        seconds: as its header says; 0 where it does not.
    """

    name: str
    path: Path | None = None
    voice: tuple[int, str, int] | None = None
    seconds: float = 0.0

    def read(self) -> bytes:
        """The content of its file; one that cannot be read is refused."""
        if self.path is None:
            assert self.voice is not None
            return voices.wav(*self.voice)
        try:
            return safe_paths.read_regular(self.path)
        except OSError as error:
            raise DataError(f"{self.name}: {self.path} cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class Message:
    """A turn of a conversation.

    Attributes:
        role: system, user or assistant.
        parts: texts and recordings, in order.
    """

    role: str
    parts: tuple[str | Clip, ...]


@dataclass(frozen=True)
class Conversation:
    """Messages to learn from.

    Attributes:
        name: for errors.
        messages: in order.
        start: the first message whose assistant turns are targets.
        speaker: who is heard in the targets.
    """

    name: str
    messages: tuple[Message, ...]
    start: int
    speaker: str = ""

    @property
    def clips(self) -> list[Clip]:
        """Every recording, in order."""
        return [part for message in self.messages for part in message.parts if isinstance(part, Clip)]

    @property
    def targets(self) -> list[Clip]:
        """The recordings that are learned."""
        return self._recordings(taught=True)

    @property
    def references(self) -> list[Clip]:
        """The other recordings."""
        return self._recordings(taught=False)

    def _recordings(self, taught: bool) -> list[Clip]:
        chosen = [m for n, m in enumerate(self.messages) if (n >= self.start and m.role == "assistant") == taught]
        return [part for message in chosen for part in message.parts if isinstance(part, Clip)]


@dataclass(frozen=True)
class Utterance:
    """A recording and what is said in it.

    Attributes:
        name: for errors.
        text: that is said.
        clip: the recording.
        speaker: who speaks.
        scene: where, for the system's message.
        references: text and recording of each voice that is to be imitated.
        cloning: whether a reference is drawn from the speaker's other recordings where none is given.
    """

    name: str
    text: str
    clip: Clip
    speaker: str = ""
    scene: str = ""
    references: tuple[tuple[str, Clip], ...] = field(default=())
    cloning: bool = False

    def conversation(self, references: Sequence[tuple[str, Clip]]) -> Conversation:
        """The prompt with these references, and the recording as its answer."""
        messages = [*prompt(self.text, self.scene, references), Message("assistant", (self.clip,))]
        return Conversation(self.name, tuple(messages), len(messages) - 1, self.speaker)


def prompt(text: str, scene: str, references: Sequence[tuple[str, Clip]]) -> list[Message]:
    """What is asked of the assistant: the system's instruction, each reference as if it had been said, and the text.

    The layout is that of Higgs Audio's own examples; several voices are told apart as SPEAKER0, SPEAKER1, …
    """
    system = INSTRUCTION + (f"\n\n<|scene_desc_start|>\n{scene}\n<|scene_desc_end|>" if scene else "")
    messages = [Message("system", (system,))]
    for number, (said, clip) in enumerate(references):
        tag = f"[SPEAKER{number}] " if len(references) > 1 else ""
        messages += [Message("user", (tag + said,)), Message("assistant", (clip,))]
    return [*messages, Message("user", (text,))]


def text_fault(text: object) -> str | None:
    """What is wrong with a text that is to be said; None for nothing."""
    if not isinstance(text, str):
        return f"is {type(text).__name__}, not text"
    if not text.strip():
        return "is empty"
    if CONTROL in text:
        return f"contains '{CONTROL}', which begins a control token of the prompt; take it out"
    return None


class FaultError(Exception):
    """What is wrong with an entry of a manifest, as `field: reason`."""


def open_recording(name: str, path: Path, field: str, longest: float, rate: object = None) -> Clip:
    """A recording whose header has been looked at: no longer than `longest` seconds, of the `rate` that the entry says.

    Raises:
        FaultError: for what is no recording, has another rate, or is too long.
    """
    try:
        header = audio.probe(path)
    except DataError as error:
        raise FaultError(f"{field}: {error}") from error
    if rate is not None and rate != header.rate:
        raise FaultError(f"sample_rate: {rate!r}, but {path.name} has {header.rate} Hz")
    if header.frames == 0:
        raise FaultError(f"{field}: {path.name} is empty: it has no samples")
    seconds = 0.0 if header.frames is None else header.frames / header.rate  # not every header says
    if seconds > longest:
        raise FaultError(f"{field}: {path.name} has {seconds:.1f} s, more than data.max_seconds={longest:g}")
    return Clip(name, path, seconds=seconds)


def same_recording(one: Clip, other: Clip) -> bool:
    """Whether two recordings are the same bytes; files of different sizes are not read."""
    if one.path is None or other.path is None:
        return one.voice == other.voice and one.path is other.path
    if one.path == other.path:
        return True
    if one.path.stat().st_size != other.path.stat().st_size:
        return False
    return _file_digest(one.path) == _file_digest(other.path)


@lru_cache(maxsize=1 << 16)
def _file_digest(path: Path) -> str:
    return digest(safe_paths.read_regular(path))


def digest(content: bytes) -> str:
    """The SHA-256 of a recording, in hex."""
    return hashlib.sha256(content).hexdigest()


def refuse(where: str, faults: Sequence[str], count: int) -> None:
    """Raise the faults that were found among `count` samples, each a message that names sample and field.

    Raises:
        DataError: naming the first ones.
    """
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise DataError(
            f"{where}: {len(faults)} of {count} samples cannot be used: {'; '.join(faults[:3])}{more}. Fix these "
            "entries, or take them out"
        )
