"""Made-up communities, written as a study is: sequences that evolve along a tree, and subjects of two kinds.

A kind prefers some clades, a subject has a community of its own, and its visits differ a little. So distances between
visits, subjects and kinds grow in that order, and both the `kind` (a class) and the `share` of the first clade (a
number) of a sample can be predicted from its sequences.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono import compute_once, generator
from unisono.recipe_tools import import_extra
from unisono_microbiome.settings import Samples, Simulated, Study

_KINDS = ("calm", "stirred")
_MUTATIONS = 0.04  # of a base along a branch of mean length
_KIND, _SUBJECT, _VISIT = 1.5, 1.0, 0.4  # standard deviations of log abundance
_PRESENCE = 0.3  # by how much a kind changes the probability of a taxon to be there
_ABSENT = 0.15  # probability of a subject's taxon to be absent from a visit
_FIRST, _LAST = 0.7, 1.4  # reads of a sample, relative to the mean


def simulate_study(config: Simulated) -> Study:
    """The files of a made-up study, in the cache, as the settings of a study."""
    sizes = [config.subjects, config.visits, config.taxa, config.bases, config.reads]

    def files(folder: Path) -> dict[str, Path]:
        names = {"table": "table.biom", "tree": "tree.nwk", "metadata": "metadata.tsv", "taxonomy": "taxonomy.tsv"}
        return {key: (folder / name).resolve(strict=True) for key, name in names.items()}

    found = compute_once("microbiome", ["simulated", *sizes], lambda f: _write(config, f), files, cache=config.cache)
    common = {name: getattr(config, name) for name in Samples.model_fields}
    return Study(kind="study", **common, **found)


def _write(config: Simulated, folder: Path) -> None:
    biom = import_extra("biom", "microbiome", "data=simulated")
    newick, sequences, clades = _simulate_tree(config.taxa, config.bases)
    counts, subjects = _simulate_reads(config, clades)
    samples = [f"S{subject}.{visit}" for subject in range(config.subjects) for visit in range(config.visits)]
    table = biom.Table(counts.T, sequences, samples)
    (folder / "table.biom").write_text(table.to_json("Unisono", creation_date=datetime(2025, 1, 1)), encoding="utf-8")
    (folder / "tree.nwk").write_text(newick + "\n")
    lineages = [f"{sequence}\tk__Simulated; c__{clade}\n" for sequence, clade in zip(sequences, clades, strict=True)]
    (folder / "taxonomy.tsv").write_text("".join(["Feature ID\tTaxon\n", *lineages]))
    shares = counts[:, clades == 0].sum(1) / counts.sum(1)
    lines = [
        f"{sample}\tS{subject}\t{_KINDS[subject % len(_KINDS)]}\t{share:.6f}\n"
        for sample, subject, share in zip(samples, subjects, shares, strict=True)
    ]
    (folder / "metadata.tsv").write_text("".join(["sample_name\tsubject\tkind\tshare\n", *lines]))


def _simulate_tree(taxa: int, bases: int) -> tuple[str, list[str], NDArray[np.int64]]:
    """A tree in Newick format, the sequences of its tips, all different, and the clade of each, 0 to 7."""
    rng = generator("simulated", "tree", taxa, bases)
    root = rng.integers(0, 4, bases)
    tips: list[tuple[str, NDArray[np.int64], int]] = []
    seen: set[str] = set()

    def grow(sequence: NDArray[np.int64], count: int, depth: int, clade: int) -> str:
        length = float(rng.exponential(1.0)) + 0.1
        changed = rng.random(bases) < min(0.5, _MUTATIONS * length)
        sequence = np.where(changed, (sequence + rng.integers(1, 4, bases)) % 4, sequence)
        if count == 1:
            while (letters := "".join("ACGT"[base] for base in sequence)) in seen:
                place = rng.integers(bases)
                sequence[place] = (sequence[place] + 1) % 4
            seen.add(letters)
            tips.append((letters, sequence, clade))
            return f"{letters}:{length:.6f}"
        left = count // 2 if depth < 3 else int(rng.integers(1, count))  # eight clades of about one size
        halves = (
            grow(sequence, part, depth + 1, clade * 2 + number if depth < 3 else clade)
            for number, part in enumerate((left, count - left))
        )
        return f"({','.join(halves)}):{length:.6f}"

    newick = f"({grow(root, taxa // 2, 1, 0)},{grow(root, taxa - taxa // 2, 1, 1)});"
    return newick, [letters for letters, _, _ in tips], np.array([clade for _, _, clade in tips])


def _simulate_reads(config: Simulated, clades: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reads, (samples, taxa), and the subject of each sample."""
    rng = generator("simulated", "reads", config.subjects, config.visits, config.taxa, config.reads)
    samples, kind = config.subjects * config.visits, np.arange(config.subjects) % len(_KINDS)
    subjects = np.repeat(np.arange(config.subjects), config.visits)
    common = rng.normal(0.0, 1.0, config.taxa)
    kinds = rng.normal(0.0, _KIND, (len(_KINDS), clades.max() + 1))[:, clades]
    own = rng.normal(0.0, _SUBJECT, (config.subjects, config.taxa))
    # A kind also decides which taxa a subject lacks, or presence would tell nothing of it.
    lacking = 0.5 - _PRESENCE * np.tanh(kinds)
    own[rng.random((config.subjects, config.taxa)) < lacking[kind]] = -np.inf
    own[:, 0] = np.maximum(own[:, 0], 0.0)  # and has one for certain
    visits = rng.normal(0.0, _VISIT, (samples, config.taxa))
    visits[:, 1:][rng.random((samples, config.taxa - 1)) < _ABSENT] = -np.inf
    logs = common + kinds[kind][subjects] + own[subjects] + visits
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    depths = (config.reads * rng.uniform(_FIRST, _LAST, samples)).astype(np.int64)
    return rng.multinomial(depths, shares), subjects
