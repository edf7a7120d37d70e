"""What a model is cut into, and what each wrapper makes of its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from packages.unisono.tests import processes
from packages.unisono.tests.tasks import LENGTH, VOCABULARY, LinearTask, Transformer, TransformerTask
from unisono.config.schema.layout import Layout
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.parallel import wrap
from unisono.optim.sharded import gather_full
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import Context

CPU = torch.device("cpu")
TRAINING = Context(0, training=True)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Other(Block):
    pass


class Holding(nn.Module):
    """A model of named parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def layout(strategy: str = "single", **more: Any) -> Layout:
    more = {"shards": 2, "world_size": 4} | more if strategy == "hsdp" else more
    return Layout.model_validate({"strategy": strategy, **more})


# blocks ---------------------------------------------------------------------------------------------------------------


def identical(found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def nested(members: Sequence[nn.Module]) -> nn.Module:
    return nn.ModuleList([Holding(inner=nn.ModuleList(members))])


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda m: Holding(first=nn.Linear(4, 4), layers=nn.ModuleList(m)), id="members of a list"),
        pytest.param(lambda m: Holding(layers=nn.Sequential(*m)), id="members of a sequence"),
        pytest.param(lambda m: nn.Sequential(*m), id="a model that is a sequence itself"),
        pytest.param(lambda m: Holding(a=Holding(b=Holding(layers=nn.ModuleList(m)))), id="at any depth"),
        pytest.param(lambda m: Holding(layers=nested(m)), id="inside of a list of one"),
        pytest.param(lambda m: Holding(a=nn.ModuleList(m[:2]), b=nn.ModuleList(m[2:])), id="two lists in order"),
    ],
)
def test_members_of_outermost_lists_that_share_a_class_are_blocks(model: Callable[..., nn.Module]) -> None:
    members = [Block() for _ in range(4)]
    assert identical(wrap.find_blocks(model(members)), members)
    outer = [Holding(inner=nn.ModuleList([Block(), Block()])) for _ in range(4)]
    assert identical(wrap.find_blocks(model(outer)), outer)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        Holding(a=Block(), b=Block()),  # in no list
        Holding(layers=nn.ModuleList([Block()])),  # repeated once is not repeated
        Holding(layers=nn.ModuleList([Block(), Other()])),
        Holding(norms=nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        Holding(layers=nn.ModuleList([])),
    ],
    ids=["leaf", "attributes", "one", "two classes", "list of leaves", "sequence of leaves", "empty"],
)
def test_a_model_without_repeated_blocks_is_one_piece(model: nn.Module) -> None:
    assert wrap.find_blocks(model) == []


def test_a_module_that_asks_for_it_is_gathered_by_itself() -> None:
    blocks, encoder = nn.ModuleList([Block(), Block()]), Holding(inner=Block())
    model = Holding(encoder=encoder, layers=blocks)
    assert identical(wrap.find_units(model), list(blocks))
    encoder.fsdp_unit = True  # type: ignore[assignment]
    assert identical(wrap.find_units(model), [*blocks, encoder])
    assert identical(wrap.find_blocks(model), list(blocks))
    for module in (blocks[0], encoder.inner):
        module.fsdp_unit = True  # type: ignore[union-attr, assignment]
    assert identical(wrap.find_units(model), [*blocks, encoder.inner, encoder])


def hugging_face(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "llama": {
            "hidden_size": 16,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32},
    }[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=50, **settings))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.needs("transformers")
def test_blocks_of_a_language_model_are_its_layers_and_its_width_is_its_hidden_size(name: str) -> None:
    model = hugging_face(name)
    layers = model.model.layers if name == "llama" else model.transformer.h
    assert len(layers) == 3
    assert identical(wrap.find_blocks(model), list(layers))
    assert wrap.model_width(model) == 16


# width and buckets ----------------------------------------------------------------------------------------------------


def test_the_width_is_that_of_most_elements_and_not_of_most_matrices_and_one_without_matrices() -> None:
    small = [nn.Linear(4, 100) for _ in range(3)]
    assert wrap.model_width(nn.ModuleList([*small, nn.Linear(64, 64)])) == 64
    assert wrap.model_width(nn.ModuleList([*small, nn.Linear(16, 16)])) == 4
    assert wrap.model_width(nn.Sequential(nn.LayerNorm(7), nn.Conv2d(8, 8, 3))) == 1


@pytest.mark.parametrize(
    ("width", "world_size", "megabytes"),
    [
        (1, 2, 25.000003),
        (1024, 8, 28.145728),
        (4096, 8, 75.331648),
        (4096, 32, 75.331648),
        (4096, 33, 112.997472),
        (8192, 8, 226.326592),
        (8192, 64, 250.0),
        (16384, 2, 250.0),
    ],
)
def test_buckets_grow_with_the_width_and_with_the_world_up_to_a_cap(
    width: int, world_size: int, megabytes: float
) -> None:
    assert wrap.ddp_bucket_mb(width, world_size) == pytest.approx(megabytes, rel=1e-12)


# scaling --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "reduction", "factor"),
    [
        ("single", "fast", 1.0),
        ("single", "ordered", 1.0),
        ("ddp", "fast", 4.0),
        ("ddp", "ordered", 1.0),
        ("fsdp", "fast", 1.0),
        ("hsdp", "fast", 1.0),
    ],
)
def test_only_ddp_divides_by_the_number_of_processes(strategy: str, reduction: str, factor: float) -> None:
    assert wrap.gradient_factor(layout(strategy, reduction=reduction), 4) == factor


# the step -------------------------------------------------------------------------------------------------------------


def test_a_step_that_nothing_wraps_is_its_own_inside() -> None:
    step = wrap.StepModule(LinearTask(), nn.Linear(3, 1))
    assert wrap.wrap(step, layout(), "fp32", CPU, 1, 60.0) is step
    assert unwrapped(step) is step


def unwrapped(step: nn.Module) -> Any:
    """The step module in a wrapper."""
    return getattr(step, "module", step)


# two processes --------------------------------------------------------------------------------------------------------


def data(rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def linear_step() -> wrap.StepModule:
    torch.manual_seed(0)
    return wrap.StepModule(LinearTask(), nn.Linear(3, 1))


def scales(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def gradient(step: nn.Module, *ranks: int, factor: float = 1.0) -> torch.Tensor:
    """The weight's gradient after backward passes over the batches of these ranks."""
    for rank in ranks:
        total, _ = step(data(rank), TRAINING, scales(square=factor))
        total.backward()
    return gather_full(unwrapped(step).model.weight.grad).detach().clone()


def gathered(kind: str) -> dict[str, Any]:
    """What FSDP shards of a transformer, and in which dtype each leaf finds its weights when it computes."""
    torch.manual_seed(0)
    step = wrap.wrap(
        wrap.StepModule(TransformerTask(), Transformer(0.0)), layout("fsdp", world_size=2), kind, CPU, 2, 60.0
    )
    model = unwrapped(step).model
    dtypes: dict[str, str] = {}
    beside: list[bool] = []

    def see(module: nn.Module, _: Any, name: str) -> None:
        own = list(module.parameters(recurse=False))
        assert not any(isinstance(parameter, DTensor) for parameter in own)
        dtypes[name] = str(own[0].dtype).removeprefix("torch.")

    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(partial(see, name=name))
    model.blocks[0].register_forward_pre_hook(lambda *_: beside.append(isinstance(model.blocks[1].up.weight, DTensor)))
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with precision.autocast(kind, CPU):
        batch = {"tokens": tokens, "lengths": torch.full((2,), float(LENGTH))}
        total, _ = step(batch, TRAINING, scales(next=1.0, length=1.0))
    total.backward()
    return {
        "units": sorted(name for name, module in step.named_modules() if isinstance(module, FSDPModule)),
        "dtypes": dtypes,
        "one at a time": beside,
        "master": {str(parameter.dtype) for parameter in model.parameters()},
        "gradients": {str(parameter.grad.dtype) for parameter in model.parameters() if parameter.grad is not None},
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def on_two(place: ProcessInfo, group: Communicator) -> dict[str, Any]:
    result: dict[str, Any] = {"fp32": gathered("fp32"), "bf16": gathered("bf16")}
    result["sum"] = gradient(linear_step(), 0, 1)
    result["own"] = gradient(linear_step(), place.rank)
    for strategy in ("ddp", "fsdp"):
        settings = layout(strategy, world_size=2)
        step = wrap.wrap(linear_step(), settings, "fp32", CPU, 2, 60.0)
        result[strategy] = gradient(step, place.rank, factor=wrap.gradient_factor(settings, 2))
        if strategy == "ddp":
            result["wrapper"] = (
                isinstance(step, DistributedDataParallel),
                isinstance(unwrapped(step), wrap.StepModule),
            )
            step = wrap.wrap(linear_step(), settings, "fp32", CPU, 2, 60.0)
            result["round"] = gradient(unwrapped(step), place.rank)
            result["buckets"] = [
                wrap.wrap(linear_step(), layout("ddp", world_size=2, **asked), "fp32", CPU, 2, 60.0).bucket_bytes_cap
                for asked in ({}, {"bucket_mb": 3.0})
            ]
        else:
            result["root only"] = [name for name, module in step.named_modules() if isinstance(module, FSDPModule)]
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in result.items()}


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return processes.run(on_two, 2)


def test_fsdp_shards_the_blocks_and_then_the_rest_and_a_model_without_blocks_as_one(both: list[dict[str, Any]]) -> None:
    for result in both:
        assert result["fp32"]["units"] == ["", "model.blocks.0", "model.blocks.1"]
        assert result["fp32"]["sharded"]
        assert result["root only"] == [""]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_fsdp_gathers_one_block_at_a_time_from_master_weights_in_fp32(both: list[dict[str, Any]], kind: str) -> None:
    for result in both:
        assert result[kind]["one at a time"] == [True]
        assert result[kind]["master"] == result[kind]["gradients"] == {"torch.float32"}


def test_under_bf16_matrices_of_blocks_are_gathered_in_bf16_and_all_else_in_fp32(both: list[dict[str, Any]]) -> None:
    norms = {f"blocks.{number}.norms.{norm}" for number in range(2) for norm in range(2)}
    for result in both:
        low = {name for name, dtype in result["bf16"]["dtypes"].items() if dtype == "bfloat16"}
        full = {name for name, dtype in result["bf16"]["dtypes"].items() if dtype == "float32"}
        leaves = ["attention.query", "attention.key", "attention.value", "attention.out", "up", "down"]
        assert low == {f"blocks.{number}.{leaf}" for number in range(2) for leaf in leaves}
        assert full == {*norms, "embedding", "norm", "head"}
        assert set(result["fp32"]["dtypes"].values()) == {"float32"}
        own_groups = set(result["bf16"]["units"]) - set(result["fp32"]["units"])
        assert own_groups == {f"model.{norm}" for norm in norms}


def test_a_step_called_through_its_wrapper_has_the_sum_of_all_gradients_and_one_called_round_it_its_own(
    both: list[dict[str, Any]],
) -> None:
    for result in both:
        for strategy in ("ddp", "fsdp"):
            assert result[strategy] == pytest.approx(result["sum"], rel=1e-5)
        assert result["wrapper"] == (True, True)
        assert (result["round"] == result["own"]).all()
        assert result["round"] != pytest.approx(result["sum"], rel=1e-2)
        assert result["buckets"] == [int(wrap.ddp_bucket_mb(1, 2) * 2**20), 3 * 2**20], "the formula's, or as given"


# what FSDP cannot shard, and what it gathers together -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.tensor(0.5), "'scale' has no axis, .* or give it the shape"),
        (torch.ones(2, dtype=torch.complex64), "'scale' is complex, .* use layout.strategy=ddp"),
    ],
)
def test_fsdp_refuses_what_it_cannot_shard_by_name(parameter: torch.Tensor, message: str) -> None:
    model = Stack(2)
    model.scale = nn.Parameter(parameter)
    with pytest.raises(ConfigError, match=message):
        wrap.wrap(wrap.StepModule(LinearTask(), model), layout("fsdp"), "fp32", CPU, 2, 60.0)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_fsdp_refuses_a_hook_on_a_gradient_which_it_would_never_call(register: str) -> None:
    """The claim: a model trains under FSDP as under DDP, or is refused; a mask on a gradient was lost in silence."""
    model = Stack(2)
    getattr(next(model.blocks[1].parameters()), register)(lambda tensor: None)
    with pytest.raises(ConfigError, match=r"'blocks\.1\..*' has a hook on its gradient.* use layout.strategy=ddp"):
        wrap.wrap(wrap.StepModule(LinearTask(), model), layout("fsdp"), "fp32", CPU, 2, 60.0)


def gathered_together(place: ProcessInfo, group: Communicator) -> list[list[str]]:
    """The units of FSDP, where passes call all blocks and where they may leave some out."""
    result = []
    for leaving_out in (False, True):
        step = wrap.StepModule(LinearTask(), Stack(2))
        wrap.wrap(step, layout("fsdp", find_unused_parameters=leaving_out), "fp32", CPU, 2, 60.0)
        result.append([name for name, module in step.named_modules() if isinstance(module, FSDPModule)])
    return result


def test_a_model_whose_passes_leave_blocks_out_is_gathered_as_one_piece() -> None:
    assert processes.run(gathered_together, 2) == [[["", "model.blocks.0", "model.blocks.1"], [""]]] * 2
