"""Distances of real samples, on held-out subjects: all pairs of a global batch against those each process has alone.

    python benchmarks/microbiome.py DIR [--steps 300] [--seeds 0] [--folds 0] [--encoder transformer]

`DIR` has table.biom, metadata.tsv with `host_subject_id`, and tree.nwk. Unweighted UniFrac of 1000 reads of each sample
is learnt by a small model that reads DNA, or, much faster, that has a vector of each taxon (`--encoder taxon`). What W
processes with local pairs compute is computed on one process, by leaving out the pairs of rows that would lie on
different ones; the count of pairs is then that of the local ones, as in a mean over processes of their means.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import unisono
from unisono.recipes.microbiome import losses, predict
from unisono.recipes.microbiome.modelling import MicrobiomeConfig, Model
from unisono.recipes.microbiome.predict import Prediction
from unisono.recipes.microbiome.settings import Study
from unisono.recipes.microbiome.task import Microbiome
from unisono.task import Context, Loss

BATCH = 32


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
            total = total + losses.pairs(own, own, truth, 0)[0]
        return Loss({"distance": total}, self._weights)  # type: ignore[dict-item]


def run(data: Path, encoder: str, processes: int, steps: int, seed: int, fold: int, folder: Path) -> dict[str, float]:
    """Train on all subjects but those of the fold; returns the scores of all pairs of held-out samples."""
    study = Study(
        kind="study", table=data / "table.biom", metadata=data / "metadata.tsv", tree=data / "tree.nwk",
        group="host_subject_id", fold=fold, rarefy=1000, distances_of="rarefied",
    )  # fmt: skip
    model = Model(
        features=32,
        heads=2,
        sequence_layers=1,
        taxon_layers=1,
        sample_layers=1,
        recompute=False,
        encoder=encoder,  # type: ignore[arg-type]
    )
    task = Local(Local.Config(processes=processes), model=model, data=study)
    result = unisono.train(
        task,
        {
            "optim.lr": 2e-3, "train.steps": steps, "train.global_batch": BATCH, "train.clip_norm": 1.0,
            "layout.world_size": 1, "layout.threads": 1, "eval.at_end": False, "eval.every": None,
            "checkpoint.every": None, "run.dir": str(folder), "run.name": f"{processes}-{seed}-{fold}",
            "run.seed": seed, "observe.progress": False,
        },
    )  # fmt: skip
    return predict.scores(predict.predict(result.folder, Prediction(draws=3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--encoder", default="transformer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    print("| pairs | seed | fold | MAE | MAE of the mean | correlation | sd, predicted / true | R² |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for fold in asked.folds:
            for seed in asked.seeds:
                for processes in asked.processes:
                    made = run(asked.data, asked.encoder, processes, asked.steps, seed, fold, Path(folder))
                    name = "all" if processes == 1 else f"local, {processes} processes"
                    keys = ("mae", "mae of the mean", "correlation", "sd_ratio", "r2")
                    cells = " | ".join(f"{made[f'distance/{key}']:.3f}" for key in keys)
                    print(f"| {name} | {seed} | {fold} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
