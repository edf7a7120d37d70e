"""What a model is given of samples: the taxa and masked nucleotides that were drawn, and their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono import Batch
from unisono_microbiome.study.library import SampleRecord

TaxaAndReads = tuple[NDArray[np.int64], NDArray[np.int64]]  # taxa, and reads of each


@dataclass(frozen=True)
class DrawnSample:
    """The part of a record that a model sees.

    Attributes:
        record: it.
        taxa: numbers of the taxa that were drawn, (taxa,).
        counts: reads of each, (taxa,).
        masked_taxa: those whose nucleotides are masked, (sequences,).
        masked: which of them, (sequences, length).
    """

    record: SampleRecord
    taxa: NDArray[np.int64]
    counts: NDArray[np.int64]
    masked_taxa: NDArray[np.int64]
    masked: NDArray[np.bool_]


def collate_taxa(rows: Sequence[TaxaAndReads]) -> Batch:
    """Padded samples: `taxa`, -1 where there is none, and `counts`, both (rows, taxa)."""
    width = max(1, max(len(taxa) for taxa, _ in rows))
    taxa = np.full((len(rows), width), -1, dtype=np.int64)
    counts = np.zeros((len(rows), width), dtype=np.float32)
    for row, (own, reads) in enumerate(rows):
        taxa[row, : len(own)], counts[row, : len(own)] = own, reads
    return {"taxa": taxa, "counts": counts}


def collate_masks(samples: Sequence[DrawnSample], length: int) -> Batch:
    """Padded masks: `masked_taxa` (rows, sequences), -1 where there is none, `masked` (rows, sequences, length)."""
    most = max(1, max(len(sample.masked_taxa) for sample in samples))
    taxa = np.full((len(samples), most), -1, dtype=np.int64)
    masked = np.zeros((len(samples), most, length), dtype=bool)
    for row, sample in enumerate(samples):
        taxa[row, : len(sample.masked_taxa)] = sample.masked_taxa
        masked[row, : len(sample.masked)] = sample.masked
    return {"masked_taxa": taxa, "masked": masked}
