"""What encoders learn from a few hundred real recordings: LeJEPA, Pixio and supervision beside three baselines.

    python benchmarks/birdsong.py --data DIR --out DIR [--steps 200] [--seeds 0 1 2]

`--data` holds `birdsong_xc`, `soundscape_24h` and `esc10` (folders with metadata.csv). Encoders are trained on the
long-tail species of `birdsong_xc` (245 clips of 131 species) and on `soundscape_24h` (72 recordings without labels);
never on what they are measured on. Then each is frozen, and a linear probe of its embeddings learns the ten species of
the 78 other clips of `birdsong_xc`, or the ten classes of ESC-10. Every recording is held out once: in five parts by
recording, in five by recordist, and in ESC-10's four folds. Its scores are those of the probe that has not seen it, and
metrics are of all recordings together, with bootstrap intervals over recordings (or recordists; of ESC-10 over clips).

Beside them: the same encoder with random weights, and logistic regression on the mean log-mel spectrum (and on mean and
deviation). Results are kept in OUT/results.json after every run, and what is there is not computed again; the pictures
are in OUT, too.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono
from unisono_audio import CENTRE
from unisono_birdsong.data.library import open_library
from unisono_birdsong.evaluation import metrics, probes
from unisono_birdsong.evaluation import pictures as drawn
from unisono_birdsong.evaluation.embeddings import Embedded, embed
from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.settings import EncoderSettings, RecordingsData, SoundSettings

Array = NDArray[np.float64]
SOUND = {"rate": 16000, "duration": 5.0, "window_ms": 32.0, "hop_ms": 25.0, "low_hz": 200.0}
MODEL = {"frames": 208, "mels": 64, "patch": [16, 16], "width": 96, "depth": 4, "heads": 4, "layer_scale": 0.1}
OBJECTIVES = {
    "lejepa": ["task.lejepa.hidden=256"],
    "pixio": ["task.pixio.width=96", "task.pixio.depth=2", "task.pixio.heads=4"],
    "supervised": [],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--resamples", type=int, default=500)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    kept = words.out / "results.json"
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    tasks, pretraining = benchmark_tasks(words.data), pretraining_set(words.data, words.out)
    settings = EncoderSettings.model_validate({"sound": SoundSettings(**SOUND), **MODEL})

    def done(name: str, results: Any) -> None:
        figures[name] = results
        kept.write_text(json.dumps(figures, indent=1))
        print(name, json.dumps(results), flush=True)

    for deviation in (False, True):
        name = "mean and deviation of log-mel" if deviation else "mean log-mel"
        if name not in figures:
            done(name, {task: measure(mean_log_mel(settings, part, deviation), folds, words.resamples, task)
                        for task, (part, folds) in tasks.items()})  # fmt: skip
    for seed in words.seeds:
        for objective in ("random", *OBJECTIVES):
            name = f"{objective}/{seed}"
            if name in figures:
                continue
            if objective == "random":
                import jax

                encoder, about = Encoder(settings, jax.random.key(seed)), {}
            else:
                run = train(objective, seed, words.steps, pretraining, words.out)
                encoder, about = unisono.open_run(run).load_model().encoder, last_values(run)
            embedded = {task: embed(encoder, part) for task, (part, _) in tasks.items()}
            scored = {task: measure(embedded[task], tasks[task][1], words.resamples, task) for task in tasks}
            done(name, {**scored, "about": {**about, "date": datetime.now(UTC).isoformat(timespec="minutes")}})
    for line in table(figures):
        print(line)
    pictures(words.out, words.seeds[0], tasks, settings)


def benchmark_tasks(data: Path) -> dict[str, tuple[Any, list[NDArray[np.bool_]]]]:
    """Rows of each task, and which are held out in each of its folds."""

    def whole(folder: str, group: str, **more: Any) -> Any:
        config = RecordingsData(
            kind="recordings", path=str(data / folder), label="label", group=group, held_out=0.0, **more
        )
        return open_library(config).training

    xc = {"folder": "birdsong_xc", "where": {"source": "phoebe"}, "names": "species"}
    by_recording, by_recordist = whole(**xc, group="auto"), whole(**xc, group="recordist")
    esc = whole("esc10", "fold", names="category")
    return {
        "species, by recording": (by_recording, [unisono.hold_out(by_recording.groups, 0.2, n) for n in range(5)]),
        "species, by recordist": (by_recordist, [unisono.hold_out(by_recordist.groups, 0.2, n) for n in range(5)]),
        "ESC-10": (esc, [np.array([group == fold for group in esc.groups]) for fold in sorted(set(esc.groups))]),
    }


def pretraining_set(data: Path, out: Path) -> Path:
    """A table of the recordings to learn from, with labels of the long-tail species and none of the soundscapes."""
    rows = [row for row in csv.DictReader((data / "birdsong_xc" / "metadata.csv").open()) if row["split"] == "longtail"]
    species = sorted({row["species"] for row in rows})
    listed = [(str((data / "birdsong_xc" / row["file"]).resolve()), str(species.index(row["species"]))) for row in rows]
    scapes = csv.DictReader((data / "soundscape_24h" / "metadata.csv").open())
    listed += [(str((data / "soundscape_24h" / row["file"]).resolve()), "") for row in scapes]
    path = out / "pretraining.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *listed])
    return path


def train(objective: str, seed: int, steps: int, pretraining: Path, out: Path) -> Path:
    """Train as a user does; a run that is there already is resumed."""
    run = f"{objective}-{seed}-{steps}"
    words = [
        "train", "birdsong", "data=recordings", f"data.path={pretraining}", "data.held_out=0", "data.workers=2",
        f"task.objective={objective}", *OBJECTIVES[objective],
        *(f"model.sound.{name}={value}" for name, value in SOUND.items()),
        *(f"model.{name}={json.dumps(value)}" for name, value in MODEL.items()),
        f"train.steps={steps}", "train.global_batch=32", f"run.seed={seed}", f"run.name={run}",
        f"run.dir={out / 'runs'}",
        "checkpoint.every=100", "optim.lr=2e-3", "observe.trackers=[]",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "unisono", *words], check=True, stdout=sys.stderr)
    return out / "runs" / run


def last_values(run: Path) -> dict[str, float]:
    """Loss and spread of the embeddings, the mean over the last ten steps."""
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step and not step.get("eval")][-10:]
    names = ("loss", "embedding_spread", "embedding_rank", "probe_accuracy")
    return {name: float(np.mean([step[name] for step in steps])) for name in names if name in steps[0]}


def mean_log_mel(settings: EncoderSettings, part: Any, deviation: bool) -> Embedded:
    """The mean spectrum of each clip, (rows, mels), and its deviation over time: what needs no encoder."""
    rows = [part[number] for number in range(len(part))]
    spectrograms = settings.pipeline()([row["audio"] for row in rows], [CENTRE] * len(rows))
    clips = [
        values[:length].astype(np.float64)
        for values, length in zip(spectrograms.values, spectrograms.lengths, strict=True)
    ]
    features = [np.concatenate([clip.mean(0), *([clip.std(0)] if deviation else [])]) for clip in clips]
    truth = np.array([[number in row["labels"] for number in range(len(part.classes))] for row in rows])
    return Embedded(np.stack(features), truth, [row["group"] for row in rows])


def measure(
    embedded: Embedded, folds: Sequence[NDArray[np.bool_]], resamples: int, task: str
) -> dict[str, list[float]]:
    """Metrics of the scores that each row has from the probe that has not seen it: value, and ends of the interval."""
    scores = np.full(embedded.truth.shape, -np.inf)
    for aside in folds:
        groups = [group for group, held_out in zip(embedded.groups, aside.tolist(), strict=True) if not held_out]
        probe = probes.fit("linear", embedded.embeddings[~aside], embedded.truth[~aside], groups)
        logits = probe.scores(embedded.embeddings[aside])
        logits = logits - logits.max(1, keepdims=True)
        logits = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        scores[np.ix_(aside, probe.classes)] = logits  # log probabilities, so that folds can be ranked together
    drawn = None if task == "ESC-10" else embedded.groups  # its four folds are too few to draw from
    metrics_of_task = metrics.evaluate(scores, embedded.truth, drawn, resamples=resamples)
    return {
        name: [round(value, 4) for value in (score.value, score.low, score.high)]
        for name, score in metrics_of_task.items()
    }


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: for each encoder and task the mean over seeds, their range, and the mean interval over recordings."""
    tasks = [task for task in next(iter(results.values())) if task != "about"]
    lines = [
        "| encoder | " + " | ".join(f"{task}: top-1 / cmAP" for task in tasks) + " |",
        "|---" * (len(tasks) + 1) + "|",
    ]
    for name in dict.fromkeys(key.split("/")[0] for key in results):
        seeds = [results[key] for key in results if key.split("/")[0] == name]
        cells = []
        for task in tasks:
            both = []
            for metric in ("top1", "cmap"):
                values = np.array([seed[task][metric] for seed in seeds])
                mean, low, high = values.mean(axis=0)
                spread = f" ({values[:, 0].min():.2f}–{values[:, 0].max():.2f})" if len(values) > 1 else ""
                both.append(f"{mean:.2f}{spread} [{low:.2f}, {high:.2f}]")
            cells.append(" / ".join(both))
        lines.append(f"| {name} ({len(seeds)}) | " + " | ".join(cells) + " |")
    return lines


def pictures(out: Path, seed: int, tasks: Any, settings: EncoderSettings) -> None:
    """Learning curves, embeddings by their two largest components, and a spectrogram with its reconstruction."""
    from matplotlib.figure import Figure

    runs = {path.name: path for path in sorted((out / "runs").iterdir()) if (path / "events.jsonl").is_file()}
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axis, objective in zip(figure.subplots(1, len(OBJECTIVES)), OBJECTIVES, strict=True):
        for name, path in runs.items():
            if name.startswith(objective):
                drawn.plot_losses(axis, path, name)
        axis.set_title(objective)
    figure.savefig(out / "learning_curves.png", dpi=90)
    part = tasks["species, by recording"][0]
    chosen = {name.rpartition("-")[0]: path for name, path in runs.items() if f"-{seed}-" in name}
    figure = Figure(figsize=(4 * max(1, len(chosen)), 4), layout="constrained")
    axes = figure.subplots(1, max(1, len(chosen)), squeeze=False)[0]
    for axis, (name, path) in zip(axes, chosen.items(), strict=True):
        drawn.plot_embeddings(axis, embed(unisono.open_run(path).load_model().encoder, part))
        axis.set_title(name)
    figure.savefig(out / "embeddings.png", dpi=90)
    if (path := next((path for name, path in chosen.items() if name.startswith("pixio")), None)) is not None:
        figure = Figure(figsize=(8, 6), layout="constrained")
        clip = settings.pipeline()([part[0]["audio"]], [CENTRE]).values[0]
        drawn.plot_reconstruction(figure.subplots(3, 1), unisono.open_run(path).load_model(), clip)
        figure.savefig(out / "reconstruction.png", dpi=90)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
