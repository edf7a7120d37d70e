"""The verb `predict`: of a run, or of all folds of a cross-validation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unisono import Run
from unisono_microbiome.evaluation import scoring
from unisono_microbiome.evaluation.crossvalidation import predict_ensemble
from unisono_microbiome.evaluation.predict import Predictor, Rows, predict_samples, scores, write
from unisono_microbiome.study import artifacts
from unisono_microbiome.task import Microbiome


def predict(
    run: Run,
    out: Path | None = None,
    rows: Rows = "held_out",
    draws: int = 5,
    micro_batch: int = 8,
    seed: int = 0,
    baseline: bool = True,
    ensemble: bool = False,
    device: str = "auto",
) -> Iterator[str]:
    """Predict samples with a run's newest checkpoint: a table with intervals, the distances, and how good both are.

    Args:
        run: its folder; settings of data may be replaced, e.g. data.table=FILE data.target=null.
        out: table to write, by default RUN/predictions.tsv; .tsv is metadata of QIIME 2, .qza its artifacts, and .csv,
            .jsonl and .parquet are plain tables.
        rows: held_out, training or all samples.
        draws: number of rarefactions to average; one has no interval.
        micro_batch: number of samples per forward pass.
        seed: of the rarefactions.
        baseline: also score random forests, on the model's inputs (reads and covariates) and on the number of reads;
            left out where they would not be trained on the model's samples, or be scored on samples that they know.
        ensemble: average the models of all folds of a cross-validation, of which the run is one; its intervals hold
            the models' error.
        device: cpu, cuda, …; auto uses an accelerator if there is one.
    """
    out = out or run.folder / "predictions.tsv"
    artifacts.check_suffix(out)
    predictor = Predictor(run, draws, micro_batch, seed, device)
    if ensemble:
        predicted = predict_ensemble(run, rows, draws, micro_batch, seed, device)
    else:
        predicted = predict_samples(predictor, rows)
    yield from map(str, write(predicted, out))
    yield from predictor.find_unknown(predicted.numbers)
    if predicted.target is not None:
        yield f"intervals of {predicted.target.column}: {predicted.target.covers}"
    forests = {}
    if baseline and predicted.target is not None and predicted.library.target is not None:
        assert isinstance(run.task, Microbiome)
        trained_on = run.task.assets.get("training")
        if (why := scoring.explain_no_forests(predicted.library, predicted.numbers, trained_on)) is not None:
            yield f"no forests: {why}"
        else:
            forests = scoring.predict_with_forests(predicted.library, predicted.numbers, seed)
    for name, value in scores(predicted, forests).items():
        yield f"{name}: {value:.4f}"
