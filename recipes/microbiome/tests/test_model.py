"""The model: nobody sees padding, chunks and computing again change nothing, and only what is wanted is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono_microbiome.model import ModelShape, Network, SequenceEncoder
from unisono_microbiome.settings import ModelSettings

TAXA, LENGTH, LONGEST = 23, 13, 9
ALL = frozenset({"nucleotides", "counts", "distance", "faith_pd", "target"})
ENCODERS = ["transformer", "convolution", "taxon"]


def table(length: int = LENGTH) -> Tensor:
    """Sequences of different lengths, one of which has an unknown nucleotide and one nothing but its start."""
    rng = np.random.default_rng(5)
    tokens = np.zeros((TAXA, length), dtype=np.uint8)
    for taxon, size in enumerate(rng.integers(4, LENGTH + 1, size=TAXA)):
        tokens[taxon, :size] = rng.integers(1, 5, size=size)
    tokens[:, 0] = 5
    tokens[3, 2] = 0
    tokens[4, 1:] = 0
    return torch.from_numpy(tokens)


def small(**settings: Any) -> ModelSettings:
    layers = {"sequence_layers": 2, "taxon_layers": 2, "sample_layers": 2}
    return ModelSettings(**{"features": 16, "heads": 2, **layers, "dropout": 0.0, "chunk": 4, **settings})


def model(wanted: frozenset[str] = ALL, tokens: Tensor | None = None, **settings: Any) -> Network:
    torch.manual_seed(0)
    config = small(**settings)
    if config.encoder == "taxon":
        wanted -= {"nucleotides"}
    tokens = table() if tokens is None else tokens
    shape = ModelShape(TAXA, LONGEST, tokens.shape[1], 3 if "target" in wanted else 0)
    return Network(config, wanted, shape, tokens).double()


def batch(rows: int = 5, width: int = LONGEST, masks: bool = True) -> dict[str, Tensor]:
    rng = np.random.default_rng(6)
    taxa = np.full((rows, width), -1)
    counts = np.zeros((rows, width))
    hidden = np.full((rows, 3), -1)
    masked = np.zeros((rows, 3, LENGTH), dtype=bool)
    for row in range(rows):
        size = int(rng.integers(2, LONGEST + 1))
        taxa[row, :size] = rng.choice(TAXA, size=size, replace=False)
        counts[row, :size] = rng.integers(1, 100, size=size)
        few = int(rng.integers(0, 3))
        hidden[row, :few] = taxa[row, :few]
        masked[row, :few] = (rng.random((few, LENGTH)) < 0.3) & (table()[taxa[row, :few]].numpy() % 5 > 0)
    made = {"taxa": torch.from_numpy(taxa), "counts": torch.from_numpy(counts)}
    return made | ({"masked_taxa": torch.from_numpy(hidden), "masked": torch.from_numpy(masked)} if masks else {})


def gradients(made: Network, given: dict[str, Tensor]) -> dict[str, Tensor]:
    made.zero_grad()
    outputs = made(given)
    weights = {name: torch.linspace(-1, 1.5, value.numel()).double().view_as(value) for name, value in outputs.items()}
    sum((value * weights[name]).sum() for name, value in outputs.items()).backward()
    return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("counts", ["none", "add", "concat", "film"])
def test_every_output_has_its_rows_first_and_every_parameter_a_gradient(encoder: str, counts: str) -> None:
    made = model(encoder=encoder, counts=counts, positions="learned")
    given = batch(masks=encoder != "taxon")
    outputs = made(given)
    shapes = {"shares": (5, 9), "embedding": (5, 16), "faith_pd": (5, 1), "target": (5, 3)}
    assert {name: tuple(value.shape) for name, value in outputs.items()} == (
        shapes if encoder == "taxon" else {**shapes, "masked": (5, 2)}
    )
    found = gradients(made, given)
    assert found.keys() == dict(made.named_parameters()).keys()
    assert all(bool(gradient.any()) for gradient in found.values())


@pytest.mark.parametrize("encoder", ENCODERS)
def test_nobody_sees_padding(encoder: str) -> None:
    made, given = model(encoder=encoder), batch(masks=False)
    wide = {name: torch.nn.functional.pad(value, (0, 4), value=-1 * (name == "taxa")) for name, value in given.items()}
    alone = [made({name: value[row : row + 1] for name, value in given.items()})["embedding"] for row in range(5)]
    assert torch.allclose(made(wide)["embedding"], torch.cat(alone), rtol=0, atol=1e-13)
    if encoder != "taxon":  # longer sequences beside them
        longer = model(encoder=encoder, tokens=table(LENGTH + 6))
        weights = made.state_dict()
        weights["body.encoder.position.weight"] = torch.cat(
            [weights["body.encoder.position.weight"], torch.randn(6, 16).double()]
        )
        longer.load_state_dict(weights)
        assert torch.allclose(longer(given)["embedding"], made(given)["embedding"], rtol=0, atol=1e-13)


def test_a_row_without_a_taxon_and_a_sequence_without_a_nucleotide_are_numbers() -> None:
    made, given = model(), batch(masks=False)
    given["taxa"][2], given["counts"][2] = -1, 0.0
    given["taxa"][3, 0] = 4
    outputs = made(given)
    assert all(bool(value.isfinite().all()) for value in outputs.values())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(made, given).values())


def test_an_unknown_nucleotide_is_seen_by_nobody() -> None:
    made = model()
    encoder = made.body.encoder
    assert isinstance(encoder, SequenceEncoder)
    before = encoder(torch.tensor([3, 5]))
    with torch.no_grad():
        encoder.token.weight[0] += torch.linspace(-1, 1, 16)
    after = encoder(torch.tensor([3, 5]))
    assert torch.equal(before, after)
    with torch.no_grad():
        encoder.token.weight[1] += torch.linspace(-1, 1, 16)
    assert not torch.allclose(before, encoder(torch.tensor([3, 5])))


@pytest.mark.parametrize("encoder", ["transformer", "convolution"])
def test_chunks_and_computing_again_change_nothing(encoder: str) -> None:
    given = batch()
    whole = gradients(model(encoder=encoder, chunk=1000, recompute=False), given)
    assert all(bool(gradient.any()) for gradient in whole.values())
    for settings in ({"chunk": 1}, {"chunk": 5}, {"chunk": 5, "recompute": False}):
        found = gradients(model(encoder=encoder, **settings), given)
        for name, gradient in whole.items():
            assert float((found[name] - gradient).norm()) <= 1e-12 * float(gradient.norm()), (settings, name)


def test_what_is_computed_again_has_the_same_dropout() -> None:
    found = []
    for recompute in (False, True):
        made = model(dropout=0.3, recompute=recompute)
        torch.manual_seed(7)
        found.append(gradients(made, batch()))
    plain = gradients(model(), batch())
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient)
    assert any(not torch.allclose(found[0][name], plain[name]) for name in plain)


def test_each_taxon_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = model(), batch(masks=False)
    seen: list[int] = []
    inner = SequenceEncoder._hidden

    def hidden(self: SequenceEncoder, tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return inner(self, tokens)

    monkeypatch.setattr(SequenceEncoder, "_hidden", hidden)
    with torch.no_grad():
        made(given)
    different = len(given["taxa"].clamp(min=0).unique())
    assert sum(seen) == different < int((given["taxa"] >= 0).sum())
    assert max(seen) == 4


def test_memory_for_the_backward_pass_does_not_grow_with_nucleotides() -> None:
    """What the graph keeps, counted by torch itself."""
    kept = {}
    for chunk in (4, 1000):
        made, given, sizes = model(chunk=chunk, recompute=chunk == 4), batch(), []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encoder = made.body.encoder
            assert isinstance(encoder, SequenceEncoder)
            encoder(given["taxa"][given["taxa"] >= 0])
        kept[chunk] = sum(sizes)
    assert kept[4] < kept[1000] / 20


def test_only_what_a_loss_needs_is_there() -> None:
    def parts(*wanted: str) -> set[str]:
        return {".".join(name.split(".")[:2]) for name, _ in model(frozenset(wanted)).named_parameters()}

    assert parts("nucleotides") == {"body.encoder"}
    assert parts("counts") == {"body.encoder", "body.taxa", "body.taxa_norm", "body.share"}
    body = {
        "body.encoder",
        "body.taxa",
        "body.taxa_norm",
        "body.fusion",
        "body.samples",
        "body.samples_norm",
        "body.pool",
    }
    assert parts("distance") == body
    assert parts("target") == body | {"target.weight", "target.bias"}
    assert model(frozenset({"nucleotides"}))(batch()).keys() == {"masked"}
    assert model(frozenset({"counts"}))(batch(masks=False)).keys() == {"shares"}


def test_the_counts_of_taxa_are_told_without_seeing_them() -> None:
    made, given = model(), batch(masks=False)
    other = {**given, "counts": given["counts"] * 3 + 1}
    assert torch.equal(made(given)["shares"], made(other)["shares"])
    assert not torch.allclose(made(given)["embedding"], made(other)["embedding"])


def test_masked_nucleotides_are_hidden() -> None:
    """The cross-entropy is that of what the others say: the hidden nucleotide itself is nowhere in the input."""
    taxon = torch.tensor([5])
    masked = torch.zeros(1, LENGTH, dtype=torch.bool)
    masked[0, 2] = True
    logits = []
    for nucleotide in (1, 2):
        tokens = table()
        tokens[5, 2] = nucleotide
        made = model(tokens=tokens)
        encoder = made.body.encoder
        assert isinstance(encoder, SequenceEncoder)
        assert encoder.nucleotides is not None
        hidden = encoder._hidden(tokens[5:6].long().masked_fill(masked, 6))
        logits.append(encoder.nucleotides(hidden)[0, 2])
        nats = -logits[-1].log_softmax(-1)[nucleotide]
        assert torch.allclose(encoder(taxon, masked)[0, 0], nats, rtol=0, atol=1e-13)
    assert torch.equal(logits[0], logits[1])


def test_frozen_bodies_neither_learn_nor_drop() -> None:
    made = model(dropout=0.5, from_run="run", freeze=True).train()
    given = batch(masks=False)
    assert torch.equal(made(given)["embedding"], made(given)["embedding"])
    assert {name.split(".")[0] for name, p in made.named_parameters() if p.requires_grad} == {"faith_pd", "target"}
    moving = model(dropout=0.5).train()
    assert not torch.equal(moving(given)["embedding"], moving(given)["embedding"])
