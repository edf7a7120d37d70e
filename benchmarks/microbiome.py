"""Real samples of held-out subjects: distances, of all pairs against those each process has alone; and a target.

    python benchmarks/microbiome.py DIR [--steps 300] [--seeds 0] [--folds 0] [--encoder transformer]
    python benchmarks/microbiome.py DIR --target ibd --encoder taxon --steps 150 [--pretrain 300] [--folds 0 1 2 3 4]

`DIR` has table.biom, metadata.tsv with `host_subject_id`, and tree.nwk. Unweighted UniFrac of 1000 reads of each sample
is learnt by a small model that reads DNA, or, much faster, that has a vector of each taxon (`--encoder taxon`). What W
processes with local pairs compute is computed on one process, by leaving out the pairs of rows that would lie on
different ones; the count of pairs is then that of the local ones, as in a mean over processes of their means.

A target of two classes is told beside others that are trained on the same subjects: the recipe's random forest, one of
the number of reads alone, a linear model of log counts, and the nearest neighbours by the true distances. Over all
folds every subject is held out once, so the area under the curve is that of all samples together: a fold may hold out
subjects of one class only. `--pretrain` also goes on from a run that has learnt the distances of the same training
subjects: all of the model, and, ten times as fast, its head alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

import unisono
from unisono.task import Context, Loss
from unisono_microbiome import losses
from unisono_microbiome.evaluation import scoring
from unisono_microbiome.evaluation.predict import Predictor, predict_samples, scores
from unisono_microbiome.settings import LossWeights, MicrobiomeConfig, ModelSettings, Study
from unisono_microbiome.study.library import Library
from unisono_microbiome.task import Microbiome

BATCH = 32
Array = NDArray[np.float64]


class Local(Microbiome):
    """The recipe with the mistake of many scripts: a row is compared with the rows of its own process."""

    class Config(MicrobiomeConfig):
        """The recipe's, and how many processes there would be."""

        processes: int = 1

    config: Config

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        if not context.training or self.config.processes == 1:
            return super().loss(outputs, batch, context)
        size = BATCH // self.config.processes
        total = 0.0
        for first in range(0, len(batch["sample"]), size):
            rows = slice(first, first + size)
            numbers = batch["sample"][rows]
            truth = self._truth(numbers.device)[numbers[:, None], numbers]
            own = outputs["embedding"][rows]
            total = total + losses.pair_loss(own, own, truth, 0)[0]
        return Loss({"distance": total}, self._weights)  # type: ignore[dict-item]


def run(data: Path, encoder: str, processes: int, steps: int, seed: int, fold: int, folder: Path) -> dict[str, float]:
    """Train on all subjects but those of the fold; returns the scores of all pairs of held-out samples."""
    task = Local(Local.Config(processes=processes), model=small(encoder), data=study(data, fold))
    trained = train(task, steps, seed, folder, f"{processes}-{seed}-{fold}")
    return scores(predict_samples(Predictor(unisono.open_run(trained), draws=3), "held_out"))


def study(data: Path, fold: int, **more: Any) -> Study:
    """The files of a study, of which a fold is held out."""
    return Study(
        kind="study", table=data / "table.biom", metadata=data / "metadata.tsv", tree=data / "tree.nwk",
        group="host_subject_id", fold=fold, rarefy=1000, distances_of="rarefied", **more,
    )  # fmt: skip


def small(encoder: str, **more: Any) -> ModelSettings:
    """`model=tiny`, without computing anything again."""
    return ModelSettings(
        features=32,
        heads=2,
        sequence_layers=1,
        taxon_layers=1,
        sample_layers=1,
        recompute=False,
        encoder=encoder,  # type: ignore[arg-type]
        **more,
    )


def train(task: Microbiome, steps: int, seed: int, folder: Path, name: str, lr: float = 2e-3) -> Path:
    """Train on one process; returns the run's folder."""
    changes = {
        "optim.lr": lr, "train.steps": steps, "train.global_batch": BATCH, "train.clip_norm": 1.0,
        "layout.world_size": 1, "layout.threads": 1, "eval.at_end": False, "eval.every": None,
        "checkpoint.every": None, "run.dir": str(folder), "run.name": name,
        "run.seed": seed, "observe.progress": False,
    }  # fmt: skip
    result: Path = unisono.train(task, changes).folder
    return result


def target(arguments: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """The area under the curve of all held-out samples of the folds, by what predicts them; training: mean of folds."""
    truth: list[Array] = []
    predictions: dict[str, list[Array]] = {}
    for fold in arguments.folds:
        models = {"this recipe": (small(arguments.encoder), 2e-3)}
        if arguments.pretrain:
            known = pretrained(arguments, fold, folder)
            models["fine-tuned"] = small(arguments.encoder, from_run=known), 2e-3
            models["fine-tuned head"] = small(arguments.encoder, from_run=known, freeze=True), 2e-2
        config = MicrobiomeConfig(weights=LossWeights(target=1.0))
        for name, (model, lr) in models.items():
            task = Microbiome(config, model=model, data=study(arguments.data, fold, target=arguments.target))
            trained = train(task, arguments.steps, seed, folder, f"{name.replace(' ', '-')}-{seed}-{fold}", lr)
            predicted = predict_samples(Predictor(unisono.open_run(trained), draws=5), "held_out")
            assert predicted.target is not None and predicted.library.target is not None
            predictions.setdefault(name, []).append(predicted.target.mean[:, 1])
            library, values, numbers = predicted.library, predicted.library.target.values, predicted.numbers
            own = predict_samples(Predictor(unisono.open_run(trained), draws=1), "training")
            assert own.target is not None
            area = roc_auc_score(values[own.numbers], own.target.mean[:, 1])
            predictions.setdefault(f"{name}, training", []).append(np.array([area]))
        truth.append(np.asarray(values[numbers], dtype=np.float64))
        seen = {"random forest": scoring.read_shares(library), "number of reads": scoring.read_depths(library)}
        seen["random forest of all reads"] = library.counts.toarray() / seen["number of reads"]
        for name, features in seen.items():
            predictions.setdefault(name, []).append(scoring.predict_with_forest(library, features, numbers, seed)[:, 1])
        for name, probabilities in others(library, numbers).items():
            predictions.setdefault(name, []).append(probabilities)
    return {
        name: float(np.mean(parts))
        if name.endswith("training")
        else float(roc_auc_score(np.concatenate(truth), np.concatenate(parts)))
        for name, parts in predictions.items()
    }


def pretrained(arguments: argparse.Namespace, fold: int, folder: Path) -> Path:
    """The folder of a run that has learnt the distances of the fold's training samples; made once."""
    name = f"{arguments.encoder}-{fold}-{arguments.pretrain}"
    if not (folder / name).is_dir():
        config = MicrobiomeConfig(weights=LossWeights(distance=1.0))
        task = Microbiome(
            config, model=small(arguments.encoder), data=study(arguments.data, fold, target=arguments.target)
        )
        train(task, arguments.pretrain, 0, folder, name)
    return folder / name


def others(library: Library, numbers: NDArray[np.int64]) -> dict[str, Array]:
    """What simple models predict of samples, (n,) probabilities of the second class each."""
    assert library.target is not None
    training, values = library.training().rows, library.target.values
    logs = np.log1p(1000 * scoring.read_shares(library))
    linear = LogisticRegression(max_iter=2000).fit(logs[training], values[training])
    apart = library.distances()
    near = KNeighborsClassifier(15, metric="precomputed").fit(apart[np.ix_(training, training)], values[training])
    return {
        "linear, log counts": linear.predict_proba(logs[numbers])[:, 1],
        "15 nearest, true UniFrac": near.predict_proba(apart[np.ix_(numbers, training)])[:, 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--encoder", default="transformer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--target", help="column of two classes; without it, distances")
    parser.add_argument("--pretrain", type=int, default=0, help="steps on distances, to go on from")
    parser.add_argument("--folder", type=Path, help="for the runs of a target, which are kept")
    arguments = parser.parse_args()
    (targets if arguments.target else distances)(arguments)


def distances(arguments: argparse.Namespace) -> None:
    """Print a line for each way, seed and fold."""
    print("| pairs | seed | fold | MAE | MAE of the mean | correlation | sd, predicted / true | R² |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for fold in arguments.folds:
            for seed in arguments.seeds:
                for processes in arguments.processes:
                    result = run(
                        arguments.data, arguments.encoder, processes, arguments.steps, seed, fold, Path(folder)
                    )
                    name = "all" if processes == 1 else f"local, {processes} processes"
                    keys = ("mae", "mae of the mean", "correlation", "sd_ratio", "r2")
                    cells = " | ".join(f"{result[f'distance/{key}']:.3f}" for key in keys)
                    print(f"| {name} | {seed} | {fold} | {cells} |", flush=True)


def targets(arguments: argparse.Namespace) -> None:
    """Print a line for each seed."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(arguments.seeds):
            result = target(arguments, seed, arguments.folder or Path(folder))
            if not number:
                print("| seed |", " | ".join(result), "|")
                print("|---" * (1 + len(result)) + "|")
            print(f"| {seed} |", " | ".join(f"{value:.2f}" for value in result.values()), "|", flush=True)


if __name__ == "__main__":
    main()
