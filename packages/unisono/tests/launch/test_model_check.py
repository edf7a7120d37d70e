"""`unisono check` and `unisono describe`: the model is built without memory; what does not fit is refused or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from packages.unisono.tests import tasks
from packages.unisono.tests.runs import configuration
from unisono.config.schema import Settings
from unisono.launch.model.check import build_without_memory, check_model
from unisono.launch.model.summary import describe_model
from unisono.optim import optimizers
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss, Task


class Fitting(tasks.LinearTask):
    def build(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1)]
        return torch.nn.Sequential(*layers, *(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)),
                                   torch.nn.Linear(8, 1))  # fmt: skip


class Huge(Fitting):
    """Of a terabyte."""

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 500_000), torch.nn.Linear(500_000, 500_000),
                                   torch.nn.Linear(500_000, 1))  # fmt: skip


class Misfit(Fitting):
    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(9, 1))


class Vector(Fitting):
    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum(1)})


class Looking(Fitting):
    """Looks at the content of a tensor."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return model(batch["x"]) if float(batch["x"].max()) < 1e9 else None


class Drawn(Fitting):
    def build(self) -> torch.nn.Module:
        model = super().build()
        assert torch.randn(3).sum().item() != 0
        return model


def test_what_fits_is_counted_and_says_how_it_is_updated() -> None:
    found = check_model(Fitting(), configuration(optim={"kind": "sgd", "lr": 0.5}))
    assert (found.parameters, found.unchecked) == (3 * 8 + 8 + 16 + 3 * 72 + 9, ())
    assert found.updates[0].startswith("sgd, lr 0.5, weight decay ")


class NormFirst(Fitting):
    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LayerNorm(3), super().build())


def test_the_largest_group_of_parameters_is_described_first() -> None:
    """A run's header shows one line of them."""
    config = configuration(optim={"kind": "adamw", "weight_decay": 0.1})
    checked, model = check_model(NormFirst(), config).updates, NormFirst().build()
    assert [line.partition(" parameters in ")[0].rpartition(" ")[2] for line in checked] == ["224", "55"]
    optimizer = optimizers.build_optimizer(config.optim, model)
    assert optimizers.describe_updates(config.optim, optimizer, model) == list(checked)


def test_a_model_larger_than_any_memory_is_checked() -> None:
    found = check_model(Huge(), configuration())
    assert found.parameters == 3 * 500_000 + 500_000 + 500_000**2 + 500_000 + 500_001
    assert all(parameter.is_meta for parameter in build_without_memory(Huge(), configuration()).parameters())


@pytest.mark.parametrize(
    ("kind", "groups", "told"),
    [
        (Fitting, {"optim": {"kind": "sgd", "groups": [{"match": "body.*"}]}}, r"optim.groups: 'body.\*' matches no"),
        (Fitting, {"ema": {"decay": 0.9, "exclude": ["body*"]}}, r"ema.exclude: 'body\*' matches no parameter"),
        pytest.param(
            Fitting,
            {"adapter": {"kind": "lora", "targets": ["query"]}},
            "adapter.targets: 'query' matches no linear",
            marks=pytest.mark.needs("peft"),
        ),
        (Misfit, {}, "Misfit, on the first .* rows: the forward pass fails: RuntimeError: .* 8"),
        (Vector, {}, r"the term 'square' has the shape \(\d+,\); return a scalar sum"),
    ],
)
def test_what_a_start_would_refuse_is_refused(kind: type[Any], groups: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_model(kind(), configuration(**groups))


def test_moments_are_compared_with_the_model_unless_the_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def moments(name: str) -> dict[str, torch.Tensor]:
        entries = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1), "step": torch.ones(())}
        return {f"{name}.{entry}": value for entry, value in entries.items()}

    path = tmp_path / "some.safetensors"
    config = configuration(optim={"kind": "adamw", "moments": path})
    save_file(moments("bias"), path)
    with pytest.raises(ConfigError, match=r"fits no parameter: 'bias \(not in the model\)'"):
        check_model(Fitting(), config)
    assert check_model(Fitting(), config, resumes=True).warnings == ()
    save_file({**moments("6.bias"), **moments("bias")}, path)
    assert check_model(Fitting(), config).warnings == (f"optim.moments={path}: 1 do not fit: bias (not in the model)",)


def test_what_needs_the_content_of_tensors_is_named_and_not_refused() -> None:
    (looking,) = check_model(Looking(), configuration()).unchecked
    assert looking.startswith("the forward pass (")
    drawn = check_model(Drawn(), configuration())
    assert drawn.parameters is None and "the model (Drawn.build needs the content of tensors" in drawn.unchecked[0]


def test_a_jax_model_is_checked_by_its_shapes() -> None:
    jax_tasks = pytest.importorskip("packages.unisono.tests.jax_tasks")
    config = configuration(layout={"engine": "jax"})
    found = check_model(jax_tasks.LinearTask(), config)
    assert found.parameters == 4 and "the forward pass" in found.unchecked[0]
    with pytest.raises(ConfigError, match="matches no parameter"):
        check_model(
            jax_tasks.LinearTask(), configuration(layout={"engine": "jax"}, ema={"decay": 0.9, "exclude": ["z"]})
        )


def test_layers_are_described_with_shapes_and_parameters_and_repeated_blocks_once() -> None:
    lines = list(describe_model(Fitting(), configuration()))
    assert [line.split() for line in lines] == [
        ["layer", "kind", "parameters", "shapes"],
        ["0", "Linear", "32", "8×3,", "8"],
        ["1", "BatchNorm1d", "16", "8,", "8"],
        ["3", "…", "5.0", "Linear", "216", "8×8,", "8"],
        ["6", "Linear", "9", "1×8,", "1"],
        ["273", "parameters,", "273", "trained"],
    ]


def test_a_jax_model_is_described_by_its_parameters() -> None:
    jax_tasks = pytest.importorskip("packages.unisono.tests.jax_tasks")
    described = list(describe_model(jax_tasks.LinearTask(), configuration(layout={"engine": "jax"})))
    assert "4 parameters, 4 trained" in described


class Texts(Task):
    """A model of transformers, which looks at the content of its mask."""

    class Config(Settings):
        positions: int = 8

    def data(self) -> list[dict[str, Any]]:
        return [{"ids": np.arange(8), "mask": np.ones(8, np.int64), "label": 1}] * 4

    def build(self) -> Any:
        transformers = pytest.importorskip("transformers")
        small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        sizes = {**small, "vocab_size": 16, "max_position_embeddings": self.config.positions}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        return model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits

    def loss(self, outputs: Any, batch: Any, context: Any) -> Loss:
        return Loss({"label": torch.nn.functional.cross_entropy(outputs, batch["label"], reduction="sum")})


def test_shapes_of_a_model_that_needs_content_on_meta_are_checked_all_the_same() -> None:
    assert check_model(Texts(), configuration()).unchecked == ()
    with pytest.raises(ConfigError, match=r"Texts, on the first \d+ rows: the forward pass fails: .*size"):
        check_model(Texts(Texts.Config(positions=4)), configuration())


def test_a_forward_pass_that_depends_on_content_is_named_as_not_checked() -> None:
    class Counts(Texts):
        def outputs(self, model: Any, batch: Any, context: Any) -> Any:
            return super().outputs(model, batch, context) * int(batch["ids"].sum())

    (unchecked,) = check_model(Counts(), configuration()).unchecked
    assert unchecked.startswith("the forward pass (DataDependentOutputException")
    assert "depends on the content of a batch" in unchecked
