"""Preferences: pairs of answers of which one was chosen, learned by direct preference optimisation (DPO).

The loss of a pair is `-log σ(β · ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected))))`, where `p`
is the model in training and `r` the model that it began with (Rafailov et al., 2023). What `r` says of an answer never
changes, so it is computed once, before the run, and kept: training needs no second model.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import Batch, ConfigError, Loss, compute_array_once, file_hash
from unisono.recipe_tools import PromoteToDouble, show_progress
from unisono_language.data.chat import IGNORED
from unisono_language.data.texts import digest
from unisono_language.settings import FromConfig, Pretrained

if TYPE_CHECKING:
    from torch import Tensor

    from unisono_language.data.library import Library
    from unisono_language.data.tokens import TokenStore
    from unisono_language.settings import Preferences

Tokens = NDArray[np.int64]
_REFERENCE_TOKENS = 1 << 14  # of a batch of the reference model


@dataclass(frozen=True)
class Pair:
    """Two conversations that differ in their answers.

    Attributes:
        chosen: the tokens of the better one, of which all before the answer are complements.
        rejected: those of the other.
        reference: what the reference model says of either answer, the log-probability in nats, (2,) float64.
    """

    chosen: Tokens
    rejected: Tokens
    reference: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PairRows:
    """Some pairs of a store, whose rows are a chosen and a rejected conversation after each other.

    Attributes:
        store: of the conversations.
        pairs: the numbers of the pairs.
        reference: log-probabilities of all answers in the store, (pairs, 2).
    """

    store: TokenStore
    pairs: Tokens
    reference: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> Pair:
        if not 0 <= row < len(self):
            raise IndexError(f"pair {row} of {len(self)}")
        pair = int(self.pairs[row])
        chosen, rejected = (self.store.slice(2 * pair + n, 0, int(self.store.lengths[2 * pair + n])) for n in (0, 1))
        return Pair(chosen, rejected, self.reference[pair])

    @cached_property
    def lengths(self) -> Tokens:
        """Tokens of each pair, both answers together, (pairs,)."""
        return self.store.lengths[2 * self.pairs] + self.store.lengths[2 * self.pairs + 1]

    @property
    def manifest(self) -> dict[str, Any]:
        """The files that the rows come from; see `unisono.open_source`."""
        return {"fingerprint": self.store.shards.fingerprint, "files": self.store.files}

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if shards have changed since they were opened; see `unisono.open_source`."""
        self.store.shards.check_files(share, shares)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the pairs, in hex."""
        return digest([self.store.shards.fingerprint, self.pairs.tolist(), int(self.store.lengths.max())])


def pair_rows(
    library: Library, data: Preferences, model: FromConfig | Pretrained
) -> tuple[dict[str, PairRows], dict[str, PairRows]]:
    """Pairs to train on, and pairs held out, by source; with what the model that the run begins with says of them."""
    if isinstance(model, FromConfig):
        raise ConfigError(
            "data=preferences compares answers with those of the model that the run begins with; fine-tune one "
            "(model=pretrained model.path=DIR)"
        )
    parts: tuple[dict[str, PairRows], dict[str, PairRows]] = ({}, {})
    for name, chosen in library.split.items():
        store: Any = library.corpora[name]
        reference = compute_reference(store, model, data.reference_precision, data.cache)
        for part, rows in zip(parts, chosen, strict=True):
            if len(rows):
                part[name] = PairRows(store, rows, reference)
    return parts


def compute_reference(store: TokenStore, model: Pretrained, precision: str, cache: Path | None) -> NDArray[np.float64]:
    """What the model says of each answer, (pairs, 2); computed once per host, on an accelerator if there is one.

    Args:
        store: of the conversations.
        model: in a directory, whose weights are part of the address of the result.
        precision: fp32 or fp64.
        cache: None for the user's.
    """
    weights = sorted(model.path.glob("*.safetensors"))
    if not weights:
        raise ConfigError(
            f"model.path: {model.path} has no *.safetensors, so the reference of the preferences cannot be computed; "
            "give the directory of the model that the run began with"
        )
    names = [*weights, model.path / "config.json"]
    cut = int(store.lengths.max())
    address = [store.shards.fingerprint, cut, precision, [[path.name, file_hash(path)] for path in names]]
    shape = (len(store) // 2, 2)
    return compute_array_once(
        "preferences",
        address,
        lambda: _ask(store, model, precision).reshape(shape),
        is_valid=lambda found: found.shape == shape and bool(np.isfinite(found).all()),
        cache=cache,
    )


def _ask(store: TokenStore, config: Pretrained, precision: str) -> NDArray[np.float64]:
    """The log-probabilities of all answers in a store, (conversations,).

    On an accelerator, in a process of its own: one that goes on to start others must not have used it.
    """
    import torch

    if precision != "fp32" or not torch.accelerator.is_available():
        return _log_probabilities(store, config, precision, "cpu")
    device = str(torch.accelerator.current_accelerator())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_log_probabilities, store, config, precision, device).result()


def _log_probabilities(store: TokenStore, config: Pretrained, precision: str, device: str) -> NDArray[np.float64]:
    """The log-probabilities of all answers in a store, (conversations,); of similar lengths together."""
    import torch

    from unisono_language.model import build_model

    built: Any = build_model(config, store.tokenizer.size)
    model = built.eval().to(device, torch.float64 if precision == "fp64" else torch.float32)
    exact = PromoteToDouble() if precision == "fp64" else nullcontext()  # models write float32 in their code
    found = np.zeros(len(store), dtype=np.float64)
    order = np.argsort(store.lengths, kind="stable")
    with (
        show_progress("reference model", len(store), "tokens", "answers", patience=2.0) as progress,
        torch.no_grad(),
        exact,
    ):
        for rows in _batches(order, store.lengths):
            samples = [store.slice(int(row), 0, int(store.lengths[row])) for row in rows]
            batch = pad(samples, 1)
            inputs, targets = (torch.from_numpy(batch[name]).to(device) for name in ("inputs", "targets"))
            logits = model(input_ids=inputs, use_cache=False).logits
            found[rows] = sequence_log_probabilities(logits, targets).double().cpu().numpy()
            progress(len(rows), int(sum(map(len, samples))))
    return found


def _batches(order: Tokens, lengths: Tokens) -> Iterator[Tokens]:
    """Rows in this order, as many at a time as have up to so many tokens when padded."""
    first = 0
    while first < len(order):
        last = first + 1
        while last < len(order) and (last + 1 - first) * int(lengths[order[last]]) <= _REFERENCE_TOKENS:
            last += 1
        yield order[first:last]
        first = last


def sequence_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each row's targets, (rows,), from logits (rows, length, vocabulary)."""
    import torch

    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return -losses.view(targets.shape).sum(1)


def pad(samples: Sequence[Tokens], multiple: int) -> dict[str, NDArray[Any]]:
    """Conversations as `inputs`, `targets` and `real`, each (rows, length)."""
    length = max(1, -(-max(len(sample) - 1 for sample in samples) // multiple)) * multiple
    inputs = np.zeros((len(samples), length), dtype=np.int64)
    targets = np.full((len(samples), length), IGNORED, dtype=np.int64)
    for row, sample in enumerate(samples):
        end = len(sample) - 1
        inputs[row, :end] = np.where(sample[:-1] < 0, ~sample[:-1], sample[:-1])
        targets[row, :end] = np.where(sample[1:] < 0, IGNORED, sample[1:])
    ends = np.array([[len(sample) - 1] for sample in samples])
    return {"inputs": inputs, "targets": targets, "real": np.arange(length) < ends}


def collate(pairs: Sequence[Pair], multiple: int) -> Batch:
    """Pairs to `inputs`, `targets` and `real`, each (pairs, 2, length), and `reference`, (pairs, 2)."""
    both = pad([one for pair in pairs for one in (pair.chosen, pair.rejected)], multiple)
    batch = {name: array.reshape(len(pairs), 2, -1) for name, array in both.items()}
    return {**batch, "reference": np.stack([pair.reference for pair in pairs])}


def loss(log_probabilities: Tensor, reference: Tensor, beta: float, label_smoothing: float) -> Loss:
    """Summed losses of pairs, and what they say of the answers.

    Args:
        log_probabilities: of the model in training, (pairs, 2): of the chosen answer, and of the rejected one.
        reference: of the reference model, (pairs, 2).
        beta: how far the model may move from the reference; less is further.
        label_smoothing: the probability that a choice was a mistake (conservative DPO).
    """
    from torch.nn.functional import logsigmoid

    rewards = _rewards(log_probabilities, reference, beta)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
    count = float(len(margins))
    metrics = {
        "accuracy": ((margins.detach() > 0).sum(), count),
        "margin": (margins.detach().sum(), count),
        "chosen_reward": (rewards.detach()[:, 0].sum(), count),
        "rejected_reward": (rewards.detach()[:, 1].sum(), count),
    }
    return Loss({"preference": losses.sum()}, metrics=metrics)


def predictions(log_probabilities: Tensor, reference: Any, beta: float) -> dict[str, list[float]]:
    """Log-probabilities of the answers of each pair, and its margin as `loss` reports it; arguments as there."""
    import torch

    rewards = _rewards(log_probabilities, torch.as_tensor(reference, device=log_probabilities.device), beta)
    chosen, rejected = log_probabilities.unbind(1)
    columns = {"chosen": chosen, "rejected": rejected, "margin": rewards[:, 0] - rewards[:, 1]}
    return {name: values.tolist() for name, values in columns.items()}


def _rewards(log_probabilities: Tensor, reference: Tensor, beta: float) -> Tensor:  # (pairs, 2)
    return beta * (log_probabilities - reference.to(log_probabilities.dtype))
