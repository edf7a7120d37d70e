"""Adapters: what is put where, what is trained, saved and refused, and what is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import configuration, layout, logged, parameters, started
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.config.schema.run import Lora
from unisono.engines.torch import lora
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.lora import Adapter
from unisono.runtime.code import entry_points
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import CheckpointError, ConfigError
from unisono.task_config import read_run

pytestmark = pytest.mark.needs("peft")
LORA = Lora(kind="lora", rank=2)


def lora_config(**settings: Any) -> Lora:
    return Lora(kind="lora", **{"rank": 2, **settings})


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.named_parameters() if ".lora_" in name}


def layers(model: nn.Module) -> list[str]:
    return sorted({name.partition(".lora_")[0] for name in adapters(model)})


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return TransformerTask().build()


# where they are put ---------------------------------------------------------------------------------------------------


def test_every_linear_layer_gets_one_but_a_head_that_is_tied() -> None:
    model = transformer()
    Adapter(LORA, model, seed=0)
    assert len(layers(model)) == 2 * 6
    assert not any("head" in name for name in layers(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapters(model))


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (["query"], ["blocks.0.attention.query", "blocks.1.attention.query"]),
        (["blocks.1.attention.key"], ["blocks.1.attention.key"]),
        (["blocks.0.*", "down"], 7),
    ],
)
def test_layers_are_chosen_by_name_by_last_part_and_by_glob(targets: list[str], chosen: Any) -> None:
    model = transformer()
    Adapter(lora_config(targets=targets), model, seed=0)
    assert layers(model) == chosen or len(layers(model)) == chosen


def test_a_name_is_not_taken_for_the_end_of_another() -> None:
    """PEFT would take '0' for every layer whose name ends in '.0'."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), nn.Sequential(nn.Linear(1, 1)))
    Adapter(lora_config(targets=["0", "1.1"]), model, seed=0)
    assert layers(model) == ["0", "1.1"]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2), nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (transformer, ["qwery"], r"'qwery' matches no linear layer, did you mean 'query'\?"),
        (transformer, ["norm"], "'norm' matches no linear layer"),
        (transformer, ["head"], r"'head' cannot have an adapter: its weights are shared \(embedding.weight and head"),
        (Attending, ["out_proj"], "'attention.out_proj' cannot have an adapter: torch's MultiheadAttention multiplies"),
        (lambda: nn.Sequential(nn.Conv1d(1, 1, 1)), [], "no linear layer that can have an adapter"),
    ],
)
def test_what_can_have_none_is_refused_with_the_reason(model: Any, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapter(lora_config(targets=targets), model(), seed=0)


def test_out_projections_of_torch_s_attention_are_passed_over() -> None:
    model = Attending()
    Adapter(LORA, model, seed=0)
    assert layers(model) == ["out"]


def test_without_peft_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "find_spec", lambda name: None)
    lora.check_peft_installed(None)
    with pytest.raises(ConfigError, match=r"pip install 'unisono\[lora\]'"):
        lora.check_peft_installed(LORA)


# their first weights --------------------------------------------------------------------------------------------------


def test_first_weights_depend_on_the_layer_s_name_and_the_seed_alone() -> None:
    every, few, other = transformer(), transformer(), transformer()
    torch.manual_seed(5)
    Adapter(LORA, every, seed=3)
    state = torch.get_rng_state()
    Adapter(lora_config(targets=["value"]), few, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the generator of others"
    Adapter(LORA, other, seed=4)
    mine, theirs = adapters(every), adapters(other)
    assert len(adapters(few)) == 4
    assert all(torch.equal(value, mine[name]) for name, value in adapters(few).items())
    first = [value for name, value in mine.items() if ".lora_A." in name and value.shape[1] == 16]
    assert len({tuple(value.flatten().tolist()) for value in first}) == len(first), "each layer draws its own"
    assert all(torch.equal(mine[n], theirs[n]) == (".lora_B." in n) for n in mine)
    assert not any(value.any() for name, value in mine.items() if ".lora_B." in name)


# training -------------------------------------------------------------------------------------------------------------


def trained(
    place: ProcessInfo, group: Communicator, config: Any
) -> tuple[list[float], dict[str, int], dict[str, int], list[str]]:
    """Losses, digests of the base before and after, and what was warned of."""

    def base() -> dict[str, int]:
        return {n: replicas.digest(p) for n, p in engine.view.module.named_parameters() if ".lora_" not in n}

    with logged() as warned:
        engine, steps = started(place, group, TransformerTask(), config)
        before = base()
        losses = [engine.step(batches, number, {"lr": 0.1}).loss for number, batches in enumerate(steps)]
        after = base()
    engine.close()
    return losses, before, after, warned


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_the_loss_falls_the_base_keeps_every_bit_and_nothing_is_warned_of(strategy: str) -> None:
    config = configuration(layout=layout(strategy), train={"steps": 8}, adapter=LORA.model_dump())
    for losses, before, after, warned in processes.ranks(trained, config.layout.world_size, config):
        assert losses[-1] < 0.8 * losses[0]
        assert before == after
        assert len(before) > 20
        assert warned == [], "an adapter's first gradient of zero is no sign of a parameter that is left out"


# checkpoints ----------------------------------------------------------------------------------------------------------


class Whole(TransformerTask):
    """The same in its own file's name, so that a run's folder can be read again."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    """A run with adapters and their average; the weights it ended with, and its logits."""
    result = unisono.train(
        Whole,
        {
            "run.dir": str(tmp_path_factory.mktemp("adapters")),
            "run.name": "a",
            "run.seed": 11,
            "train.steps": 4,
            "train.global_batch": 8,
            "adapter": "lora",
            "adapter.rank": 3,
            "ema.decay": 0.5,
            "optim.lr": 0.05,
            "layout.device": "cpu",
            "observe.progress": False,
        },
    )
    with runs.parts(Whole(), read_run(result.folder, trust=True), result.folder) as parts:
        model: Any = parts.engine.view.module.eval()  # type: ignore[attr-defined]
        with torch.no_grad():
            return result.folder, dict(model.state_dict()), model(TOKENS)


TOKENS = torch.arange(1, 25).reshape(2, 12)


def test_a_checkpoint_has_the_adapters_and_buffers_and_a_digest_of_the_base(run: Any) -> None:
    names = runs.newest(run[0]).reader().shapes
    model = {name.removeprefix("model/") for name in names if name.startswith("model/")}
    assert model == {name for name in run[1] if ".lora_" in name} | {"scale"}
    assert len(model) == 2 * 12 + 1
    assert names["adapter/base"] == (35,)


def test_a_merged_model_says_what_the_trained_one_says(run: Any) -> None:
    folder, _, logits = run
    merged = unisono.load_model(folder)
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in transformer().named_parameters()]
    assert all(parameter.requires_grad for parameter in merged.parameters())
    assert not merged.training
    assert not any("lora" in type(module).__module__ for module in merged.modules())
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS), logits, rtol=1e-5, atol=1e-5)
        torch.manual_seed(0)
        assert not torch.allclose(transformer()(TOKENS), merged(TOKENS), rtol=1e-2, atol=1e-2)


def test_the_average_of_the_adapters_is_merged_where_it_is_asked_for(run: Any) -> None:
    plain, averaged = unisono.load_model(run[0]), unisono.load_model(run[0], ema=True)
    with torch.no_grad():
        apart = (plain(TOKENS) - averaged(TOKENS)).abs().max()
    assert 1e-4 < float(apart) < 10


def test_another_base_is_refused_by_name(run: Any) -> None:
    model = unisono.load_model(run[0])
    with pytest.raises(
        CheckpointError, match=r"another base: \d+ of 35 parameters differ, first 'blocks\.0\.attention"
    ):
        unisono.load_weights(run[0], model)  # merged already
    assert not adapters(model), "nothing was put into a model that is refused"
    with pytest.raises(CheckpointError, match="it has 35 parameters, this one 2"):
        unisono.load_weights(run[0], LinearTask().build())


class OtherBase(TransformerTask):
    def build(self) -> nn.Module:
        model = super().build()
        with torch.no_grad():
            model.norm.weight[3] += 1e-6
        return model


def test_a_resume_on_another_base_is_refused(run: Any) -> None:
    config = read_run(run[0], trust=True)
    with pytest.raises(CheckpointError, match="another base: 1 of 35 parameters differ"):
        runs.parts(OtherBase(), config, run[0])


def test_a_checkpoint_without_adapters_is_refused_by_a_run_that_has_them(tmp_path: Path) -> None:
    runs.train(tmp_path, configuration(observe={"progress": False}), TransformerTask())
    engine, _ = processes.alone(started, TransformerTask(), configuration(adapter=LORA.model_dump()))
    with pytest.raises(CheckpointError, match="has no adapters: it was saved by a run without adapter=lora"):
        engine.load(runs.newest(tmp_path).reader())
    assert np.isfinite(parameters(engine)["norm.weight"]).all()
