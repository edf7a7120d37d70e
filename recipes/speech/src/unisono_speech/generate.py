"""The verb `generate`: what a trained model says, in the voice of a reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from unisono import Run, RunError
from unisono.recipe_tools import safe_paths
from unisono_speech.codec import FRAMES
from unisono_speech.data import labels, samples, tokens
from unisono_speech.data.labels import Row
from unisono_speech.data.samples import Clip
from unisono_speech.show import write_wav
from unisono_speech.task import Speech

log = logging.getLogger(__name__)
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn; attributes are as the arguments of `generate`.

    Repetitions are drawn again from the whole distribution, as Higgs Audio does with a window of 7 and 2 repeats
    (Chen et al., "VALL-E 2", 2024).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    window: int = 0
    repeats: int = 2
    seed: int = 0


def generate(
    run: Run,
    text: str,
    reference: Path | None = None,
    reference_text: str | None = None,
    scene: str = "",
    out: Path = Path("said.wav"),
    seconds: float = 10.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    window: int = 0,
    repeats: int = 2,
    seed: int = 0,
    ema: bool = False,
    device: str = "auto",
) -> str:
    """Speak a text with a run's newest checkpoint and write a WAV file.

    Args:
        run: its folder.
        text: the text to speak.
        reference: recording of the voice to imitate.
        reference_text: its transcript; by default read from the .txt file next to it.
        scene: the recording environment, as in training.
        out: WAV file to write.
        seconds: maximum length; the model normally stops earlier, and a message says when it does not.
        temperature: 0 takes the most likely code each time; above 0, codes are sampled.
        top_k: sample from this many most likely codes; 0 for all.
        top_p: sample from the most likely codes whose probabilities add up to this.
        window: number of past frames checked for repetitions, e.g. 7; 0 for none.
        repeats: a code that occurs this often in the window is sampled again.
        seed: of the sampling.
        ema: use the moving average of the weights (ema.decay).
        device: cpu, cuda, …; auto uses an accelerator if there is one.

    Raises:
        RunError: for numbers or texts that leave nothing to say.
        DataError: for a reference that cannot be read.
    """
    if seconds <= 0 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or window < 0 or repeats < 1:
        raise RunError(
            "seconds must be above 0, temperature, top_k and window at least 0, top_p above 0 and at most 1, and "
            "repeats at least 1"
        )
    references = _reference(reference, reference_text)
    for name, said in [("text", text), *[("reference_text", said) for said, _ in references]]:
        fault = samples.text_fault(said)
        if fault is not None:
            raise RunError(f"{name} {fault}")
    task = cast(Speech, run.task)
    row = labels.prompt_of(samples.prompt(text, scene, references), task.tokens, task.stream, task.codes)
    sampling = Sampling(temperature, top_k, top_p, window, repeats, seed)
    [(codes, finished)] = speak(run.load_model(ema=ema, device=device), task, [row], sampling, round(seconds * FRAMES))
    sound = task.codec.decode(codes)
    write_wav(out, sound, task.codec.rate)
    summary = f"{out}: {len(sound) / task.codec.rate:.2f} s, {len(codes)} frames"
    if not len(codes):
        return f"{summary}: the model began with its end code; train longer, or try another seed or temperature"
    return summary if finished else f"{summary}; cut off: the end code had not come after seconds={seconds:g}"


def speak(
    model: Any, task: Speech, prompts: Sequence[Row], how: Sampling, most_frames: int
) -> list[tuple[Codes, bool]]:
    """The codes that a model in evaluation mode generates after each prompt, and whether it came to their end.

    Prompts are rows that end where the first frame is to come, as `labels.prompt_of` makes them.
    """
    import torch

    batch = _left_padded(task, prompts)
    device = next(model.parameters()).device
    inputs = {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
    drawn: dict[str, Any] = {"do_sample": how.temperature > 0}
    if how.temperature > 0:
        drawn |= {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    settings = model.generation_config
    before = {name: getattr(settings, name, None) for name in ("ras_win_len", "ras_win_max_num_repeat")}
    settings.ras_win_len = how.window or None
    settings.ras_win_max_num_repeat = how.repeats if how.window else None
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(how.seed)
            made = model.generate(
                **inputs, max_new_tokens=most_frames + task.stream.codebooks + 1, use_cache=True,
                eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, **drawn,
            )  # fmt: skip
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
    given = batch["audio_input_ids"].shape[1] if "audio_input_ids" in batch else 0
    frames = made[:, given:].cpu().numpy()
    said = []
    for stream in frames:
        codes, finished = task.stream.restore(stream)
        # Any codebook's end code makes transformers end the others too; the last frame then is one of end codes.
        said.append((codes[:most_frames], finished or bool((stream[-1] == task.stream.end).all())))
    return said


def _left_padded(task: Speech, prompts: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """Prompts that end at the same place; their frames stay in order and end at the same place, too."""
    length, most = max(len(row.ids) for row in prompts), max(len(row.frames) for row in prompts)
    ids = np.full((len(prompts), length), task.tokens.ids[tokens.PAD], dtype=np.int64)
    attended = np.zeros((len(prompts), length), dtype=np.int64)
    frames = np.full((len(prompts), most, task.stream.codebooks), task.stream.end, dtype=np.int64)
    real = np.zeros((len(prompts), most), dtype=bool)
    for number, row in enumerate(prompts):
        ids[number, length - len(row.ids) :] = row.ids
        attended[number, length - len(row.ids) :] = 1
        frames[number, most - len(row.frames) :] = row.frames
        real[number, most - len(row.frames) :] = True
    batch = {"input_ids": ids, "attention_mask": attended}
    # without a frame, transformers takes a prompt for a step of decoding
    return {**batch, "audio_input_ids": frames, "audio_input_ids_mask": real} if most else batch


def _reference(path: Path | None, said: str | None) -> list[tuple[str, Clip]]:
    if path is None:
        if said is not None:
            raise RunError("reference_text has no effect without reference=FILE")
        return []
    if not path.is_file():
        raise RunError(f"reference={path} does not exist")
    beside = path.with_suffix(".txt")
    if said is None:
        if not beside.is_file():
            raise RunError(f"reference={path}: what is said in it? Give reference_text=…, or write it to {beside}")
        said = safe_paths.read_text(beside.parent, beside.name)
    return [(said.strip(), Clip(str(path), path))]
