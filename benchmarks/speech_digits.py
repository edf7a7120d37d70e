"""Learning that can be heard: digits said in a voice that was held out, named by a classifier of real recordings.

    python benchmarks/speech_digits.py ../shared/data/speech_digits out=runs/digits speaker=jackson seeds=0,1,2

For each seed the small model of the recipe learns from all speakers but one. It is then asked for every digit in that
speaker's voice, after one of his recordings of another digit. The classifier (logistic regression on log-mel
statistics) has seen real recordings only: takes 0 to 4 of all speakers; its own accuracy on takes 5 to 9 of the
held-out speaker stands beside, and that on these takes through the codec and back, which no model can exceed but by
luck. `Unshifted` is the same training with labels at their own places, the fault of a trainer that compares logits with
labels of the same place.
"""

from __future__ import annotations

import json
import sys
from math import sqrt
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import t as student

import unisono
import unisono_audio as audio
import unisono_speech as speech_recipe
from unisono_speech.data import labels, samples
from unisono_speech.data.labels import IGNORED, Row
from unisono_speech.data.samples import Clip
from unisono_speech.generate import Sampling, speak
from unisono_speech.show import write_wav
from unisono_speech.task import Speech

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 8000
MOST = 40  # frames that are generated at most


class Unshifted(Speech):
    """The recipe without its shift."""

    def targets(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels at their own places: what is predicted stands in the input."""
        beside = np.full((len(row.ids), row.frames.shape[1]), IGNORED, dtype=np.int64)
        beside[labels.audio_places(row.ids, self.tokens)] = row.audio_labels
        return row.text_labels, beside


class Real:
    """The real recordings, by digit, speaker and take."""

    def __init__(self, folder: Path) -> None:
        self.sounds = {
            (int(path.stem[0]), path.stem.split("_")[1], int(path.stem.split("_")[2])): audio.decode(path).samples
            for path in sorted(folder.glob("?_*_?.wav"))
        }
        if not self.sounds:
            raise SystemExit(f"{folder} has no recordings such as 3_jackson_7.wav")
        self.folder = folder


def features(sound: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-mel statistics: the mean spectrum of each fifth of the voiced part, the spread, and its length."""
    if len(sound) < 400 or not np.abs(sound).max() > 0:
        return np.zeros(193)
    bands = audio.log_mel(sound, RATE, 32, n_fft=256, hop_length=80, mel_scale="slaney", floor=1e-3)
    loud = np.flatnonzero(bands.mean(1) > bands.mean(1).max() - 6)
    voiced = bands[loud[0] : loud[-1] + 1].astype(np.float64)
    voiced = np.repeat(voiced, 5, axis=0) if len(voiced) < 5 else voiced
    level = voiced - voiced.mean()
    parts = [part.mean(0) for part in np.array_split(level, 5)]
    return np.concatenate([*parts, level.std(0), [np.log(len(voiced))]])


def classifier(real: Real) -> Any:
    """Fitted on takes 0 to 4 of every speaker."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    chosen = {key: sound for key, sound in real.sounds.items() if key[2] < 5}
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=0.05, max_iter=2000))
    return pipeline.fit([features(sound) for sound in chosen.values()], [key[0] for key in chosen])


def train(
    real: Real, task: str | type[Speech], speaker: str, seed: int, steps: int, out: Path, extra: list[str]
) -> Path:
    """A run that has learned from all speakers but one; one that is there already is taken as it is."""
    name = f"{'shifted' if task == 'speech' else 'unshifted'}-{speaker}-{seed}-{steps}"
    if (out / name / "done.json").is_file():
        return out / name
    overrides = [
        f"data.path={real.folder.resolve()}", "data.codec.rate=8000", "data.codec.mels=32", "data.codec.codes=64",
        "data.split=speaker", f"data.held_out_speakers=[{speaker}]", f"run.dir={out.resolve()}", f"run.name={name}",
        f"run.seed={seed}", f"train.steps={steps}", f"eval.every={steps}", f"checkpoint.every={steps}",
        "layout.threads=1",
        "observe.trackers=[]",
    ]  # fmt: skip
    result = unisono.train(
        task, ["data=folder", *overrides, *extra] if task == "speech" else [*_recipe(), *overrides, *extra]
    )
    (result.folder / "done.json").write_text(json.dumps({"loss": result.loss}))
    return result.folder


def _recipe() -> list[str]:
    """The recipe's own settings, for a task that is not the recipe's."""
    tiny = yaml.safe_load((Path(speech_recipe.__file__).parent / "config" / "model" / "tiny.yaml").read_text())[
        "settings"
    ]
    rope = tiny.pop("rope_parameters")
    return [
        "optim=adamw", "schedules=cosine", "optim.lr=2e-3", "train.global_batch=16", "train.clip_norm=1.0",
        "eval.rows=64",
        "model.kind=config", "data.kind=folder", "data.codec.kind=kmeans",
        *(f"model.settings.{name}={value}" for name, value in tiny.items()),
        *(f"model.settings.rope_parameters.{name}={value}" for name, value in rope.items()),
    ]  # fmt: skip


def accuracy(
    real: Real, judge: Any, folder: Path, task: str | type[Speech], speaker: str, how: Sampling
) -> dict[str, Any]:
    """What the judge hears in what a run says, and in the codec's own sound."""
    run = unisono.open_run(folder, task=task)
    speech = cast(Speech, run.task)
    prompts, wanted = [], []
    for digit, word in enumerate(WORDS):
        for take in range(10):
            other = (digit + 1 + take % 9) % 10
            clip = Clip("reference", real.folder / f"{other}_{speaker}_{take}.wav")
            messages = samples.prompt(word, "quiet room", [(WORDS[other], clip)])
            prompts.append(labels.prompt_of(messages, speech.tokens, speech.stream, speech.codes))
            wanted.append(digit)
    model = run.load_model()
    recognised = [
        part for first in range(0, 100, 25) for part in speak(model, speech, prompts[first : first + 25], how, MOST)
    ]
    kept = folder / "said"
    kept.mkdir(exist_ok=True)
    heard = []
    for number, (codes, _) in enumerate(recognised):
        sound = speech.codec.decode(codes)
        heard.append(features(sound))
        if number % 10 == 0:
            write_wav(kept / f"{WORDS[number // 10]}-temperature-{how.temperature:g}.wav", sound, RATE)
    through = {
        key: speech.codec.decode(speech.codec.encode(sound))
        for key, sound in real.sounds.items()
        if key[1] == speaker and key[2] >= 5
    }
    truth = [key[0] for key in through]
    return {
        "generated": float(np.mean(judge.predict(heard) == np.array(wanted))),
        "finished": float(np.mean([finished for _, finished in recognised])),
        "codec": float(np.mean(judge.predict([features(sound) for sound in through.values()]) == truth)),
        "real": float(np.mean(judge.predict([features(real.sounds[key]) for key in through]) == truth)),
    }


def main(words: list[str]) -> None:
    extra = [word for word in words[1:] if "." in word.partition("=")[0]]  # settings of the training
    options = dict(word.split("=", 1) for word in words[1:] if word not in extra)
    real, out = Real(Path(words[0])), Path(options.get("out", "runs/speech"))
    speaker, steps = options.get("speaker", "jackson"), int(options.get("steps", 400))
    judge = classifier(real)
    tasks: dict[str, str | type[Speech]] = {"shifted": "speech", "unshifted": Unshifted}
    for name in options.get("tasks", "shifted,unshifted").split(","):
        rows = []
        for seed in map(int, options.get("seeds", "0,1,2").split(",")):
            folder = train(real, tasks[name], speaker, seed, steps, out, extra)
            for temperature in map(float, options.get("temperatures", "0,0.7").split(",")):
                row = accuracy(real, judge, folder, tasks[name], speaker, Sampling(temperature, seed=seed))
                rows.append({"temperature": temperature, **row})
                print(json.dumps({"task": name, "seed": seed, **rows[-1]}), flush=True)
        for temperature in sorted({row["temperature"] for row in rows}):
            generated = np.array([row["generated"] for row in rows if row["temperature"] == temperature])
            count, mean = (
                len(generated),
                generated.mean(),
            )
            # Student's, as the deviation of a few seeds is itself uncertain
            spread = student.ppf(0.975, count - 1) * generated.std(ddof=1) / sqrt(count) if count > 1 else float("nan")
            print(f"{name}, temperature {temperature:g}: {100 * mean:.1f} % ± {100 * spread:.1f} (chance 10 %)")


if __name__ == "__main__":
    main(sys.argv[1:])
