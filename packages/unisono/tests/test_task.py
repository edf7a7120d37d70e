"""What a user writes: what a task has to define, what the rest does by itself, and the public face it comes from."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from packages.unisono.tests import runs
from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono import Context, Data, Loss, SampleContext, Settings, Source, Task, recipe_tools
from unisono.engines.torch.numerics import precision
from unisono.protocols import resolve_features
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, RunError
from unisono.task import run_setup
from unisono.version import __version__


class Least(Task):
    """A task with nothing but what it must have."""

    def data(self) -> list[int]:
        return [1, 2, 3]

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def counts(self, batch: Any) -> dict[str, float]:
        return {"rows": float(len(batch))}

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch)

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"rows": outputs.sum()})


# what must be defined, and what need not be ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "build", "outputs", "loss"])
def test_a_task_without_one_of_its_four_methods_cannot_be_made(name: str) -> None:
    lacking = type("Lacking", (Least,), {name: getattr(Task, name)})
    with pytest.raises(TypeError, match=f"abstract method '?{name}'?"):
        lacking()


def test_a_context_that_is_taken_for_a_generator_says_where_the_generator_is() -> None:
    context = SampleContext(np.random.default_rng(0), training=True)
    with pytest.raises(AttributeError, match=r"draw from its generator: context\.rng\.normal\("):
        context.normal()  # type: ignore[attr-defined]


def test_setup_is_called_once_in_a_process_and_again_in_a_copy_of_another_one() -> None:
    called = []

    class Slow(Least):
        def setup(self) -> None:
            called.append(self)

    task = Slow()
    run_setup(task)
    run_setup(task)
    assert called == [task]
    vars(task)["_set_up_by"] += 1  # as after a fork, or in a worker that was sent the task
    run_setup(task)
    assert called == [task, task]


def test_samples_of_one_shape_are_stacked_by_name_with_their_types() -> None:
    batch = Least().collate([{"x": np.array([1.0, 2.0]), "y": 1}, {"x": np.array([3.0, 4.0]), "y": 2}])
    assert batch.keys() == {"x", "y"}
    assert np.array_equal(batch["x"], [[1.0, 2.0], [3.0, 4.0]])
    assert np.array_equal(batch["y"], [1, 2])
    batch = Least().collate([{"a": np.float32(1), "b": torch.tensor([1], dtype=torch.int32)}])
    assert (batch["a"].dtype, batch["b"].dtype) == (np.float32, np.int32)
    with pytest.raises(DataError, match=r"different shapes in 'x' \(\(2,\) and \(3,\)\); give them one shape"):
        Least().collate([{"x": np.zeros(2)}, {"x": np.zeros(3)}])


@pytest.mark.parametrize(("sample", "kind"), [(3, "int"), (np.zeros(2), "ndarray")])
def test_samples_that_are_no_dicts_of_the_same_keys_need_a_collate_of_their_own(sample: Any, kind: str) -> None:
    message = rf"Least\.sample returned a {kind}; the default collate stacks dicts of arrays\. Return a dict, or define"
    with pytest.raises(DataError, match=message):
        Least().collate([sample])
    with pytest.raises(DataError, match=r"the keys \['x'\] for one row and \['x', 'y'\] for another"):
        Least().collate([{"x": 1.0}, {"x": 1.0, "y": 2.0}])


class Paired(Least):
    fields = ("x", "y")


def test_samples_that_are_tuples_are_named_by_fields() -> None:
    """Those of torch's TensorDataset, and of most other datasets, were refused."""
    rows = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    batch = Paired().collate([rows[0], rows[2]])
    assert batch["x"].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert batch["y"].tolist() == [0, 2]
    with pytest.raises(DataError, match=r'Least.sample returned a tuple of 2; name its items.*fields = \("x", "y",\)'):
        Least().collate([rows[0]])
    with pytest.raises(DataError, match=r"Paired.sample returned a tuple of 3, and Paired.fields has 2 names \(x, y\)"):
        Paired().collate([(1, 2, 3)])


def test_columns_of_strings_and_none_stay_on_the_host() -> None:
    """They ended in torch's traceback: "can't convert np.ndarray of type numpy.str_"."""
    batch = Least().collate([{"x": 1.0, "id": "a", "note": None}, {"x": 2.0, "id": "é", "note": "seen"}])
    assert (batch["id"].tolist(), batch["note"].tolist()) == (["a", "é"], [None, "seen"])
    moved = {name: precision.to_device(array, torch.device("cpu"), "fp64") for name, array in batch.items()}
    assert isinstance(moved["id"], np.ndarray)
    assert moved["x"].dtype == torch.float64
    with pytest.raises(DataError, match=r"lists of strings or None in 'words'.*turn them into numbers in sample"):
        Least().collate([{"words": ["a", "b"]}, {"words": ["c", None]}])


class Stateless(Least):
    def initial_carry(self, batch: Any) -> Any:
        return None


class Unnamed(Least):
    def initial_carry(self, batch: Any) -> Any:
        return torch.zeros(3, 2)


def test_a_state_without_names_is_refused() -> None:
    """It ended in "'Tensor' object has no attribute 'items'"."""
    assert resolve_features(Stateless()).initial_carry({}) is None
    with pytest.raises(ConfigError, match=r"Unnamed.initial_carry returns a Tensor; it has to be a dict of tensors by"):
        resolve_features(Unnamed()).initial_carry({})
    with pytest.raises(ConfigError, match=r"Loss\(carry=…\) is given a Tensor; it has to be a dict of tensors by name"):
        Loss({"x": torch.zeros(())}, carry=torch.zeros(3, 2))  # type: ignore[arg-type]


def test_four_methods_are_enough_and_the_rest_does_nothing_by_default(tmp_path: Path) -> None:
    assert Task.__abstractmethods__ == {"data", "build", "outputs", "loss"}
    task, rng, record = Least(), np.random.default_rng(0), {"x": 1}
    before = rng.bit_generator.state
    assert task.sample(record, SampleContext(rng, training=True)) is record
    assert rng.bit_generator.state == before
    assert (task.held_out(), task.work({}), task.facts()) == (None, {}, {})
    assert resolve_features(task).initial_carry({}) is None
    task.check()
    task.save_assets(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", [[], (1, 2), np.zeros(3), torch.zeros(3), Least().data()])
@pytest.mark.parametrize("other", [iter([1]), {1, 2}, 3])
def test_whatever_has_rows_by_number_is_a_source(source: Any, other: Any) -> None:
    assert isinstance(source, Source)
    assert not isinstance(other, Source)


# settings -------------------------------------------------------------------------------------------------------------


class Configured(Least):
    class Config(Settings):
        depth: int = 2

    class Data(Data):
        folder: str = "here"


class Choosy(Least):
    class Model(Settings):
        kind: Literal["small", "large"]


def test_settings_are_the_defaults_of_their_types_unless_given_and_a_task_without_any_takes_no_key() -> None:
    task = Configured()
    assert (task.config.depth, task.data_config.folder, task.data_config.prefetch) == (2, "here", Data().prefetch)
    config, data = Configured.Config(depth=5), Configured.Data(folder="there")
    task = Configured(config, data=data)
    assert task.config is config
    assert task.data_config is data
    assert Least().data_config == Data()
    assert Least().config.model_dump() == {}
    with pytest.raises(ValueError, match="depth"):
        Least.Config(depth=1)


def test_settings_without_a_default_have_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^Choosy needs its Model settings: (.|\n)*kind"):
        Choosy()
    assert Choosy(model=Choosy.Model(kind="large")).model_config.kind == "large"


# what a loss and a context are ----------------------------------------------------------------------------------------


def test_a_loss_and_a_context_have_no_more_than_they_are_given_and_cannot_be_changed() -> None:
    loss, context = Loss({"next": torch.ones(())}), Context(step=3, training=True)
    assert (dict(loss.weights), dict(loss.metrics), loss.carry) == ({}, {}, None)
    assert (dict(context.scalars), context.carry) == ({}, None)
    assert Loss({}).metrics is not Loss({}).metrics
    for value, name in ((loss, "weights"), (context, "step"), (context, "scalars")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, {})
    with pytest.raises(ConfigError, match=r"a metric cannot be called grad_norm, lr: "):  # every event has those
        Loss({"x": torch.tensor(1.0)}, metrics={"lr": (1.0, 1.0), "grad_norm": (1.0, 1.0), "other": (1.0, 1.0)})


# load_weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of three steps with a checkpoint after each, and the weights that it ended with."""
    folder = tmp_path_factory.mktemp("run")
    config = configuration(train={"steps": 3, "global_batch": 8}, checkpoint={"every": 1}, observe={"progress": False})
    weights: dict[str, torch.Tensor] = {}
    with runs.training(TransformerTask(), config, ProcessInfo(), SingleProcess(), folder) as training:
        for _ in training.steps():
            model = training._parts.engine.view.module  # type: ignore[attr-defined]
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    (folder / "config.yaml").write_text("recipe: test\n")
    return folder, weights


def test_a_model_is_filled_with_the_newest_weights_of_a_run_tied_ones_stay_tied_and_all_trainable(
    run: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, weights = run
    model: Any = TransformerTask().build()
    assert unisono.load_weights(folder, model) == unisono.load_weights(str(folder), model) == 3
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_another_model_is_refused_with_what_does_not_fit(run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    told = r"does not match the model: missing \['model/weight', 'model/bias'\], unexpected .*model/embedding\.weight"
    with pytest.raises(CheckpointError, match=told):
        unisono.load_weights(run[0], LinearTask().build())
    model: Any = TransformerTask().build()
    model.norm = nn.LayerNorm(5)
    with pytest.raises(CheckpointError, match=r"'model/norm\.weight' has shape \(16,\) in the checkpoint, but \(5,\)"):
        unisono.load_weights(run[0], model)


def test_a_folder_without_a_run_or_a_checkpoint_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory \(no config\.yaml\)"):
        unisono.load_weights(tmp_path, LinearTask().build())
    (tmp_path / "config.yaml").write_text("recipe: test\n")
    with pytest.raises(RunError, match="has no checkpoint yet"):
        unisono.load_weights(tmp_path, LinearTask().build())


# the public face ------------------------------------------------------------------------------------------------------


def test_every_name_of_the_public_face_is_there_and_no_other() -> None:
    from unisono.data.order.order import Order
    from unisono.launch.train import train

    assert all(getattr(unisono, name) is not None for name in unisono.__all__)
    assert (unisono.Order, unisono.train, unisono.Task, unisono.__version__) == (Order, train, Task, __version__)
    assert set(unisono._HOME) == set(unisono.__all__) - {"__version__"}
    assert dir(unisono) == sorted(unisono.__all__)
    with pytest.raises(AttributeError, match="module 'unisono' has no attribute 'trian'"):
        unisono.trian  # noqa: B018


def test_every_name_for_authors_of_recipes_is_there_and_none_stands_on_both_faces() -> None:
    assert all(getattr(recipe_tools, name) is not None for name in recipe_tools.__all__)
    assert set(recipe_tools._HOME) == set(recipe_tools.__all__) == set(dir(recipe_tools))
    assert not set(recipe_tools.__all__) & set(unisono.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'neerest'"):
        recipe_tools.neerest  # noqa: B018


HEAVY = ("torch", "numpy", "pydantic", "hydra", "rich", "safetensors", "yaml")


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import unisono", ""),
        ("from unisono import UnisonoError, __version__", ""),
        ("from unisono.recipe_tools import nearest, write_whole, safe_paths, import_extra", ""),
        ("from unisono import Settings, RunConfig", "pydantic"),
        ("from unisono import Task, Loss, Context, Source, Order, Data", "numpy pydantic"),
    ],
)
def test_a_name_loads_what_it_needs_and_never_torch(code: str, loaded: str) -> None:
    code += f"\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.stderr) == (loaded + "\n", "")
