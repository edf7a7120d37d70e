"""The language recipe with adapters and an average: trained, written with, and taken out for transformers."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import unisono
from recipes.language.tests import corpora
from recipes.language.tests.corpora import BY_HEART, KNOWN, TEXTS, trained, write_jsonl
from unisono.checkpoint.exchange.export import read_adapter_settings
from unisono.cli import main
from unisono.config.schema.run import Lora
from unisono.engines.torch.lora import Adapter
from unisono.observe.events import read_events
from unisono.runtime.errors import ConfigError, RunError
from unisono.task import Context
from unisono_language.generate import generate
from unisono_language.model import build_model
from unisono_language.settings import FromConfig

pytest.importorskip("peft", reason="peft is not installed")
SLOW = pytest.mark.slow
TOKENS = torch.arange(3, 35).reshape(2, 16)


def train(folder: Path, name: str, **settings: Any) -> Any:
    write_jsonl(folder / "corpus" / "a.jsonl", TEXTS)
    untied = {"model.settings": {**corpora.GROUPED, "tie_word_embeddings": False}}
    return trained(folder, name, **{**BY_HEART, **untied, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model that knows nothing, and a run of adapters on it that learned three sentences by heart."""
    folder = tmp_path_factory.mktemp("adapters")
    base = train(folder, "base", **{"train.steps": 1, "optim.lr": 1e-9})
    pretrained = unisono.load_model(base.folder)
    pretrained.save_pretrained(folder / "pretrained")
    shutil.copyfile(base.folder / "assets" / "tokenizer.json", folder / "pretrained" / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    rank = {"adapter.rank": 16, "adapter.alpha": 64.0, "adapter.targets": ["*_proj", "lm_head"]}
    result = train(folder, "lora", adapter="lora", **rank, **{"ema.decay": 0.8, "run.seed": 3})
    assert result.loss < 0.2
    return result.folder


def in_bf16(model: torch.nn.Module, folder: Path) -> Path:
    """The model with the values that a file of bf16 has."""
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", [{}, pytest.param({"layout.world_size": 2, "layout.strategy": "fsdp"}, marks=SLOW)])
def test_a_base_in_bf16_computes_the_same_bits_in_half_the_memory(folder: Path, layout: dict[str, Any]) -> None:
    """The claim: where weights were saved in bf16, their matrices stay in it, and no loss differs by a bit."""
    base = in_bf16(AutoModelForCausalLM.from_pretrained(folder / "pretrained"), folder / "narrow")
    shutil.copyfile(folder / "pretrained" / "tokenizer.json", base / "tokenizer.json")
    words = {
        "adapter": "lora", "model": "pretrained", "model.path": str(base), "train.precision": "bf16", "train.steps": 5,
        "train.global_batch": 4, **layout,
    }  # fmt: skip
    losses = {}
    for dtype in ("auto", "kept"):
        done = train(folder, f"narrow-{dtype}-{len(layout)}", **words, **{"adapter.base_dtype": dtype})
        losses[dtype] = [event["loss"] for event in read_events(done.folder / "events.jsonl")]
    assert losses["auto"] == losses["kept"]
    assert len(losses["auto"]) == 5
    assert len(set(losses["auto"])) == 5


def test_only_matrices_whose_values_are_of_bf16_are_narrowed(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(in_bf16(unisono.load_model(folder / "runs" / "base"), folder / "b"))
    model.float()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1 / 3
    Adapter(Lora(kind="lora"), model, 0).narrow_base(model, "bf16")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name or "norm" in name or "embed" in name} == {
        torch.float32
    }
    assert dtypes["model.layers.0.mlp.up_proj.base_layer.weight"] == torch.float32
    assert dtypes["model.layers.0.mlp.down_proj.base_layer.weight"] == dtypes["lm_head.weight"] == torch.bfloat16


def test_a_narrow_base_is_refused_where_it_is_computed_with_in_fp32(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.base_dtype=bf16 needs train\.precision=bf16"):
        train(folder, "refused", adapter="lora", **{"adapter.base_dtype": "bf16"})


def test_a_base_in_4_bits_is_refused_where_it_cannot_be_or_where_nothing_reads_it(folder: Path) -> None:
    four = {"adapter": "lora", "adapter.base_dtype": "nf4"}
    with pytest.raises(ConfigError, match=r"adapter\.base_dtype=nf4 has no kernels in fp64"):
        train(folder, "refused", **four, **{"train.precision": "fp64"})
    with pytest.raises(ConfigError, match="fsdp would cut or copy matrices without the scales of their blocks"):
        train(folder, "refused", **four, **{"layout.strategy": "fsdp", "layout.world_size": 2})
    if find_spec("bitsandbytes") is None:
        with pytest.raises(ConfigError, match=r"needs the package 'bitsandbytes': pip install 'unisono\[qlora\]'"):
            train(folder, "refused", **four)


@pytest.fixture(scope="module")
def wide(folder: Path) -> Path:
    """A trained model with rows of 64 and 128 values."""
    settings = {**corpora.WIDE, "intermediate_size": 128, "tie_word_embeddings": False}
    base = train(folder, "wide", **{"model.settings": settings, "train.steps": 30})
    unisono.load_model(base.folder).save_pretrained(folder / "wide")
    shutil.copyfile(base.folder / "assets" / "tokenizer.json", folder / "wide" / "tokenizer.json")
    return folder / "wide"


def rounded_to_nf4(wide: Path, folder: Path) -> Path:
    """The same model, in which each matrix beside an adapter is what comes back from 4 bits, in full precision."""
    from bitsandbytes import functional

    model = AutoModelForCausalLM.from_pretrained(wide)
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            small, state = functional.quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
            layer.weight.data = functional.dequantize_4bit(small, state)
    model.save_pretrained(folder)
    shutil.copyfile(wide / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_base_in_4_bits_trains_as_its_rounded_matrices_do_on_one_process_and_two(
    folder: Path, wide: Path, precision: str
) -> None:
    """The claim: of 4 bits a run keeps the rounded values, no more and no less, also after evaluations."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    words = {
        "adapter": "lora", "model": "pretrained", "model.path": str(wide), "train.steps": 12, "data.held_out": 0.3,
        "eval.every": 4, "train.global_batch": 4, "train.precision": precision, "adapter.rank": 16,
        "adapter.alpha": 64.0, "adapter.base_dtype": "nf4",
    }  # fmt: skip
    rounded = {"model.path": str(rounded_to_nf4(wide, folder / f"rounded {precision}")), "adapter.base_dtype": "kept"}
    losses = {}
    for name, more in {
        "kept": {"adapter.base_dtype": "kept"}, "rounded": rounded, "nf4": {},
        "nf4 x 2": {"layout.world_size": 2, "layout.micro_batch": 2}, "nf4 in passes": {"layout.micro_batch": 2},
    }.items():  # fmt: skip
        done = train(folder, f"{name} {precision}", **{**words, **more})
        losses[name] = [event["loss"] for event in read_events(done.folder / "events.jsonl") if "loss" in event]
    assert len(losses["nf4"]) == len(set(losses["nf4"])) == 12 + 3  # of steps and of evaluations
    assert losses["nf4"] == losses["rounded"]
    assert losses["nf4"][0] != losses["kept"][0]
    assert losses["nf4 x 2"] == pytest.approx(losses["nf4 in passes"], rel=1e-6)


@pytest.mark.slow
def test_matrices_beside_adapters_take_4_bits_and_others_stay(wide: Path, folder: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = AutoModelForCausalLM.from_pretrained(wide)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Adapter(Lora(kind="lora", base_dtype="nf4"), model, 0).narrow_base(model, "fp32")
    small = {name: layer for name, layer in model.named_modules() if name.endswith("_proj.base_layer")}
    assert len(small) == 7 * len(model.model.layers)
    for name, layer in small.items():
        whole = before[name.replace(".base_layer", "") + ".weight"]
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.numel() * 2 == whole.numel()
        own = layer(torch.eye(whole.shape[1])).T
        assert 0 < (own - whole).abs().max() < 0.2 * whole.abs().max()
    narrow = AutoModelForCausalLM.from_pretrained(folder / "pretrained")  # has rows of 32, which bitsandbytes garbles
    with pytest.raises(ConfigError, match=r"does not give 'model\.layers\.0\.self_attn\.q_proj' back from 4 bits"):
        Adapter(Lora(kind="lora", base_dtype="nf4"), narrow, 0).narrow_base(narrow, "fp32")
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.float32


def test_a_run_with_adapters_writes_what_it_has_learned(run: Path, folder: Path) -> None:
    assert generate(unisono.open_run(run), "the quick") == KNOWN
    assert generate(unisono.open_run(run), "the quick", ema=True) == KNOWN
    with pytest.raises(RunError, match=r"keeps no moving average of its weights; it was trained without ema\.decay"):
        generate(unisono.open_run(folder / "runs" / "base"), "the quick", ema=True)


def test_the_average_writes_from_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", str(run), "the quick", "ema=true"]) == 0
    assert capsys.readouterr().out == KNOWN + "\n"


def test_a_merged_model_is_one_of_transformers(run: Path, tmp_path: Path) -> None:
    merged: Any = unisono.load_model(run)
    merged.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, merged(TOKENS).logits)
    averaged: Any = unisono.load_model(run, ema=True)
    assert not torch.equal(averaged(TOKENS).logits, merged(TOKENS).logits)


def test_adapters_on_a_pretrained_model_need_its_directory_and_no_corpus(folder: Path, tmp_path: Path) -> None:
    own = {"model": "pretrained", "model.path": str(folder / "pretrained"), "adapter": "lora", "train.steps": 2}
    result = train(tmp_path, "on", **own)
    shutil.rmtree(tmp_path / "corpus")
    shutil.rmtree(tmp_path / "cache")
    assert generate(unisono.open_run(result.folder), "the", tokens=3).startswith("the")
    assert read_adapter_settings(result.folder) is not None


SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "settings", "targets", "count"),
    [("gpt2", SMALL, [], 8), ("llama", LLAMA, [], 7), ("llama", LLAMA, ["lm_head", "*.q_proj"], 2)],
)
def test_a_merged_model_says_what_the_adapted_one_did(
    architecture: str, settings: Any, targets: list[str], count: int
) -> None:
    torch.manual_seed(0)
    model: Any = build_model(FromConfig(kind="config", architecture=architecture, settings=settings), 60)
    adapters = Adapter(Lora(kind="lora", rank=3, targets=targets), model, seed=1)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * count
    model.eval()
    with torch.no_grad():
        before = model(TOKENS).logits
        for value in trained.values():
            value.normal_(0.0, 0.3)
        after = model(TOKENS).logits
        assert not torch.allclose(before, after, atol=1e-2)
        adapters.merge()
        torch.testing.assert_close(model(TOKENS).logits, after, rtol=1e-5, atol=1e-5)
    assert not any(".lora_" in name for name, _ in model.named_parameters())


def test_a_head_with_an_adapter_is_not_passed_by(tmp_path: Path) -> None:
    task = corpora.task(corpora.corpus(write_jsonl(tmp_path / "a.jsonl", TEXTS), cache=tmp_path), "qwen3, untied")
    model: Any = task.build()
    rows = task.data()
    arrays = task.collate([rows[0], rows[1]])
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    context = Context(0, training=True)
    assert "hidden" in task.outputs(model, batch, context), "by itself the head is applied chunk by chunk"
    Adapter(Lora(kind="lora", targets=["lm_head"]), model, seed=0)
    task.loss(task.outputs(model, batch, context), batch, context).sums["next_token"].backward()
    assert float(model.lm_head.lora_B.default.weight.grad.abs().max()) > 0
