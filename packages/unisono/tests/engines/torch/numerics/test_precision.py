"""`fp64` is meant wherever in a model a dtype is named, and `bf16` is autocast over master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, trace
from packages.unisono.tests.tasks import LinearTask
from unisono.engines.torch.numerics import precision
from unisono.task import Context

CPU = torch.device("cpu")
Made = Callable[[torch.Tensor], torch.Tensor]

PROMOTED: dict[str, Made] = {
    "to": lambda x: x.to(torch.float32),
    "to with a device": lambda x: x.to("cpu", torch.float32),
    "to by name": lambda x: x.to(dtype=torch.bfloat16),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "type": lambda x: x.type(torch.float16),
    "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "functional softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "zeros": lambda x: torch.zeros(3, dtype=torch.float32),
    "arange": lambda x: torch.arange(3, dtype=torch.float32),
    "full_like": lambda x: torch.full_like(x, 0.1, dtype=torch.float32),
    "new_ones": lambda x: x.new_ones(3, dtype=torch.float32),
    "of integers": lambda x: torch.arange(3).float(),
    "of booleans": lambda x: (x > 0).to(torch.float32),
}
LEFT: dict[str, tuple[Made, torch.dtype]] = {
    "to int64": (lambda x: x.to(torch.int64), torch.int64),
    "to bool": (lambda x: x.to(torch.bool), torch.bool),
    "bool": (lambda x: x.bool(), torch.bool),
    "int": (lambda x: x.int(), torch.int32),
    "long": (lambda x: x.long(), torch.int64),
    "zeros of uint8": (lambda x: torch.zeros(2, dtype=torch.uint8), torch.uint8),
    "a comparison": (lambda x: x > 0, torch.bool),
    "argmax": (lambda x: x.argmax(), torch.int64),
    "double": (lambda x: x.double(), torch.float64),
    "complex128": (lambda x: x.to(torch.complex128), torch.complex128),
    "complex64": (lambda x: x.to(torch.complex64), torch.complex128),
    "cfloat": (lambda x: x.cfloat(), torch.complex128),
    "to cfloat": (lambda x: x.to(torch.cfloat), torch.complex128),
}


def third() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64) / 3


# fp64 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMOTED)
def test_a_request_for_a_lower_floating_dtype_is_one_for_float64(name: str) -> None:
    with precision.promotion("fp64"):
        assert PROMOTED[name](third()).dtype == torch.float64
    assert PROMOTED[name](third()).dtype != torch.float64, "only while the context is in force"


@pytest.mark.parametrize("name", LEFT)
def test_other_dtypes_are_what_was_asked_for_and_lower_complex_ones_are_complex128(name: str) -> None:
    made, dtype = LEFT[name]
    with precision.promotion("fp64"):
        assert made(third()).dtype == dtype


ROWS, WEIGHTS = torch.arange(6, dtype=torch.float32).view(2, 3) / 7, torch.arange(9, dtype=torch.float64).view(3, 3) / 7
MIXED: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: F.linear(ROWS, WEIGHTS),
    "@": lambda: ROWS @ WEIGHTS,
    "einsum": lambda: torch.einsum("ab,bc->ac", ROWS, WEIGHTS),
    "conv1d": lambda: F.conv1d(ROWS[None], WEIGHTS[:, :2, None]),
    "classes that are shares": lambda: F.cross_entropy(WEIGHTS[:2], ROWS),
    "in a list": lambda: torch.block_diag(ROWS, WEIGHTS),
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_in_float32_meet_weights_in_float64(name: str) -> None:
    """Claim: rows that were float32 in NumPy ended a proof in fp64 with an error of torch."""
    with precision.promotion("fp64"):
        made = MIXED[name]()
    assert made.dtype == torch.float64
    assert float(made.detach().abs().max()) > 0


def test_what_is_written_into_keeps_its_dtype_and_its_place() -> None:
    """Else a step would fill a copy."""
    with precision.promotion("fp64"):
        lower, other = torch.zeros(2, 3).share_memory_(), torch.from_numpy(np.zeros((2, 3), np.float32))
        for one in (lower, other):
            one += WEIGHTS[:2]
            one.add_(WEIGHTS[:2])
            one[0] = WEIGHTS[0]
            one.view_as(WEIGHTS[:2])[1] = WEIGHTS[1]
            torch.mul(one, WEIGHTS[:2], out=one)
    for one in (lower, other):
        assert torch.allclose(one.double(), WEIGHTS[:2].square())
    assert other.dtype == torch.float32


def test_a_cast_and_back_loses_no_bit() -> None:
    x = third()
    with precision.promotion("fp64"):
        assert torch.equal(x.to(torch.float32).to(torch.float64), x)
    assert not torch.equal(x.to(torch.float32).to(torch.float64), x)


def test_the_grouped_product_of_experts_is_made_in_float64() -> None:
    """torch has a kernel for it in lower precision only; the last group is empty, and two rows are of none."""
    torch.manual_seed(0)
    rows, matrices = torch.randn(9, 8, dtype=torch.float64), torch.randn(4, 8, 16, dtype=torch.float64)
    rows.requires_grad_()
    matrices.requires_grad_()
    ends = torch.tensor([3, 4, 7, 7], dtype=torch.int32)
    with precision.promotion("fp64"):
        made = F.grouped_mm(rows, matrices, offs=ends)
    of_rows = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    expected = torch.einsum("ri,rio->ro", rows[:7], matrices[of_rows])
    assert torch.allclose(made[:7], expected, rtol=1e-14, atol=1e-14)
    assert made.shape == (9, 16)
    grads = [torch.autograd.grad(total.sin().sum(), (rows, matrices)) for total in (made[:7], expected)]
    assert all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in zip(*grads, strict=True))


def test_a_module_that_is_cast_inside_a_model_stays_in_float64() -> None:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    with precision.promotion("fp64"):
        layer.float()
    assert layer.weight.dtype == torch.float64


def test_bytes_are_read_as_what_they_are_and_then_promoted(tmp_path: Path) -> None:
    single = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float32) / 3
    numbers = {"a": single, "b": single.bfloat16(), "n": torch.arange(3)}
    torch.save(numbers, tmp_path / "numbers.pt")
    plain = bytearray(single.numpy().tobytes())
    with precision.loaded_as_double(), precision.promotion("fp64"):
        loaded = torch.load(tmp_path / "numbers.pt")
        made = [torch.frombuffer(plain, dtype=torch.float32)]
        made.append(torch.frombuffer(plain, dtype=torch.uint8).view(torch.float32))
        assert torch.arange(4).view(2, 2).dtype == torch.int64
    assert {name: value.dtype for name, value in loaded.items()} == {
        "a": torch.float64,
        "b": torch.float64,
        "n": torch.int64,
    }
    for tensor in (loaded["a"], *made):
        assert torch.equal(tensor, single.double())
    assert torch.load(tmp_path / "numbers.pt")["a"].dtype == torch.float32


OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Adadelta: {}, torch.optim.Adafactor: {}, torch.optim.Adagrad: {}, torch.optim.Adam: {"amsgrad": True},
    torch.optim.Adamax: {}, torch.optim.AdamW: {}, torch.optim.ASGD: {}, torch.optim.NAdam: {}, torch.optim.RAdam: {},
    torch.optim.RMSprop: {"momentum": 0.9}, torch.optim.Rprop: {}, torch.optim.SGD: {"momentum": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("how", ["fused", "foreach", "capturable", "loop"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_keeps_the_dtypes_that_it_chose_while_casts_are_promoted(
    kind: type[torch.optim.Optimizer], how: str
) -> None:
    """A fused CUDA kernel reads the bytes of a step count as float32, whatever they are."""

    def run(name: str) -> tuple[dict[str, torch.dtype], Any]:
        weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        optimizer = kind([weight], **OPTIMIZERS[kind], **({"foreach": False} if how == "loop" else {how: True}))
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.3)
            # capturable: made on a CPU, too, but no CPU runs it
            with precision.promotion(name), suppress(AssertionError) if how == "capturable" else nullcontext():
                optimizer.step()
        state = optimizer.state[weight].items()
        return {key: value.dtype for key, value in state if isinstance(value, torch.Tensor)}, weight.tolist()

    try:
        plain = run("fp32")
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"{kind.__name__} has no {how} implementation for a CPU: {error}")
    assert run("fp64") == plain
    assert plain[0] if how == "capturable" else plain[1] != torch.ones(3, 3).tolist()
    if how == "fused" and "step" in plain[0]:
        assert plain[0]["step"] == torch.float32


def test_what_a_users_code_casts_is_still_promoted_beside_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    weight.grad = torch.full_like(weight, 1 / 3)
    optimizer = torch.optim.Muon([weight], lr=0.1)
    with precision.promotion("fp64"):
        optimizer.step()  # it casts the gradient to bfloat16, which has three digits
        assert third().float().dtype == torch.float64
    exact = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(1.0)
    torch.optim.Muon([weight], lr=0.1).step()
    assert not torch.equal(weight, exact)


@pytest.mark.parametrize("name", ["fp64", "fp32"])
def test_gradients_are_scaled_and_unscaled_in_every_precision(name: str) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=precision.MASTER[name]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scales = []
    with precision.promotion(name):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for factor in (1.0, 1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            assert weight.grad is not None
            assert weight.grad.tolist() == [factor] * 3
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert weight.tolist() == [-0.5] * 3  # the infinite gradient made no update
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0]


def test_other_precisions_promote_nothing_and_after_an_error_nothing_is_promoted() -> None:
    for name in ("fp32", "bf16"):
        with precision.promotion(name):
            assert third().float().dtype == torch.float32
    with pytest.raises(ZeroDivisionError), precision.promotion("fp64"):
        raise ZeroDivisionError
    assert third().float().dtype == torch.float32


class Fails(LinearTask):
    """It fails in its first pass, where the default dtype is already float64."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        assert torch.zeros(1).dtype == torch.float64
        raise ZeroDivisionError


def test_the_default_dtype_is_restored_after_an_error() -> None:
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError):
        processes.alone(trace, Fails(), configuration(train={"precision": "fp64"}))
    assert torch.get_default_dtype() == torch.float32


# bf16 -----------------------------------------------------------------------------------------------------------------


def test_under_bf16_matrices_are_multiplied_in_bf16_and_weights_and_casts_stay_what_they_are() -> None:
    layer = nn.Linear(3, 2)
    with precision.promotion("bf16"), precision.autocast("bf16", CPU):
        assert layer(torch.ones(1, 3)).dtype == torch.bfloat16
        assert layer(torch.ones(1, 3)).float().dtype == torch.float32
    assert layer.weight.dtype == precision.MASTER["bf16"] == torch.float32


def test_parameters_of_one_storage_keep_sharing_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    precision.to_master(model, "fp64")
    assert model[1].weight.dtype == torch.float64
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
    assert model[1].bias.data_ptr() != model[0].bias.data_ptr()


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_other_precisions_cast_nothing(name: str) -> None:
    layer = nn.Linear(3, 2, dtype=precision.MASTER[name])
    with precision.autocast(name, CPU):
        assert layer(torch.ones(1, 3, dtype=precision.MASTER[name])).dtype == precision.MASTER[name]


class Watching(LinearTask):
    """Writes down whether cuDNN may compute in TF32 in each pass."""

    seen: list[bool]

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        self.seen.append(torch.backends.cudnn.allow_tf32)
        return super().outputs(model, batch, context)


@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("bf16", True)])
def test_in_fp32_cudnn_computes_in_fp32_and_nothing_is_changed_for_others(name: str, allowed: bool) -> None:
    """The claim: `fp32` is fp32. Torch has TF32 on in convolutions, three digits of a GPU's results."""
    task = Watching()
    task.seen = []
    assert torch.backends.cudnn.allow_tf32, "as torch has it"
    processes.alone(trace, task, configuration(train={"precision": name}))
    assert task.seen and set(task.seen) == {allowed}
    assert torch.backends.cudnn.allow_tf32


def test_what_somebody_has_set_for_convolutions_alone_stays() -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        with precision.without_tf32("fp32"):
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


# batches --------------------------------------------------------------------------------------------------------------


def test_floating_arrays_of_a_batch_are_float64_under_fp64_and_all_else_stays_as_it_is() -> None:
    for array in (np.array([0.5, 1.5], np.float32), torch.tensor([0.5, 1.5])):
        moved = precision.to_device(array, CPU, "fp64")
        assert (moved.dtype, moved.tolist()) == (torch.float64, [0.5, 1.5])
    for dtype, name in ((np.int64, "fp64"), (np.bool_, "fp64"), (np.uint8, "fp64"), ("f4", "bf16")):
        assert precision.to_device(np.ones(2, dtype), CPU, name).numpy().dtype == dtype
    for value in ("text", 3, None, ["a", "b"]):
        assert precision.to_device(value, CPU, "fp64") is value


# a model that casts to fp32 in many places ----------------------------------------------------------------------------

HEADS, KEY_HEADS, SIZE, WIDTH, EPS = 4, 2, 6, 24, 1e-6


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        rms_norm_eps=EPS,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Pairs of features (i, i + half) turned by position · frequency, as complex numbers."""
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def reference(weights: Mapping[str, torch.Tensor], frequencies: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a llama for one row of tokens, written out."""
    x = weights["model.embed_tokens.weight"][ids]
    ahead = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in ("model.layers.0.", "model.layers.1."):
        y = rms_norm(x, weights[layer + "input_layernorm.weight"])
        q, k, v = (
            (y @ weights[f"{layer}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, SIZE)).transpose(0, 1)
            for part in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 0) for part in (k, v))
        scores = rotated(q, frequencies) @ rotated(k, frequencies).transpose(1, 2) / math.sqrt(SIZE)
        mixed = scores.masked_fill(ahead, -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(0, 1).flatten(1) @ weights[layer + "self_attn.o_proj.weight"].T
        y = rms_norm(x, weights[layer + "post_attention_layernorm.weight"])
        gate, up = (y @ weights[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[layer + "mlp.down_proj.weight"].T
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def distance(mine: torch.Tensor, exact: torch.Tensor) -> float:
    assert mine.dtype == exact.dtype == torch.float64
    return float((mine - exact).detach().norm() / exact.detach().norm())


IDS = torch.tensor([5, 17, 3, 30, 0, 11, 11, 2, 29])


@pytest.mark.needs("transformers")
def test_neither_logits_nor_gradients_of_a_llama_have_fp32_rounding_in_them(llama: Any) -> None:
    parameters = dict(llama.named_parameters())
    exact = reference(parameters, llama.model.rotary_emb.inv_freq.double(), IDS)
    assert distance(llama(IDS[None], use_cache=False).logits[0], exact) > 1e-9
    with precision.promotion("fp64"):
        mine = llama(IDS[None], use_cache=False).logits[0]
    assert distance(mine, exact) < 1e-14
    grads = [torch.autograd.grad(logits.logsumexp(-1).sum(), list(parameters.values())) for logits in (mine, exact)]
    assert max(distance(a, b) for a, b in zip(*grads, strict=True)) < 1e-13
