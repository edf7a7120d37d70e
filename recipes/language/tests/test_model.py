"""Models of the transformers library: each trains by the loss that it would compute itself."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from packages.unisono.tests.runs import configuration, trace
from recipes.language.tests.corpora import ARCHITECTURES, GROUPED, model, store_in, task
from unisono.config.schema.run import RunConfig
from unisono.engines.observers import StepResult
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError
from unisono.task import Context
from unisono.task_config import load_config as load
from unisono_language import model as models
from unisono_language.settings import Corpus, FromConfig, Pretrained
from unisono_language.task import IGNORED

EVALUATION, TRAINING = Context(0, training=False), Context(0, training=True)


def built(name: str, data: Corpus, **settings: Any) -> tuple[Any, Any]:
    """The task and its model; the logits are widened, so that soft caps and scales matter as in a trained model."""
    language = task(data, name, **settings)
    torch.manual_seed(0)
    found = language.build().eval()
    with torch.no_grad():
        found.get_output_embeddings().weight.mul_(8)
    return language, found


def tensors(language: Any, rows: list[np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in language.collate(rows).items()}


def own_loss(found: Any, row: np.ndarray) -> float:
    """What the model makes of a row by itself: the mean over its targets, times how many they are."""
    ids = torch.from_numpy(row)[None]
    return float(found(input_ids=ids, labels=ids, use_cache=False).loss) * (len(row) - 1)


# the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_loss_is_the_one_that_the_model_computes_itself(data: Corpus, name: str) -> None:
    language, found = built(name, data, loss_chunk=5)
    rows = [language.data()[number] for number in range(6)]
    batch = tensors(language, rows)
    with torch.no_grad():
        own = sum(own_loss(found, row) for row in rows)
        for chunked in {language._uses_chunks, False}:
            language._uses_chunks = chunked
            loss = language.loss(language.outputs(found, batch, EVALUATION), batch, EVALUATION)
            assert float(loss.sums["next_token"]) == pytest.approx(own, rel=1e-5), f"chunked: {chunked}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gradients_are_those_of_the_models_own_loss(data: Corpus, name: str) -> None:
    language, found = built(name, data, loss_chunk=5)
    rows = [language.data()[number] for number in range(4)]
    batch = tensors(language, rows)
    language.loss(language.outputs(found, batch, TRAINING), batch, TRAINING).sums["next_token"].backward()
    mine = {n: p.grad.clone() for n, p in found.named_parameters() if p.grad is not None}
    found.zero_grad()
    for row in rows:
        ids = torch.from_numpy(row)[None]
        (found(input_ids=ids, labels=ids, use_cache=False).loss * (len(row) - 1)).backward()
    own = {n: p.grad for n, p in found.named_parameters() if p.grad is not None}
    assert mine.keys() == own.keys()
    whole = sum(float(gradient.square().sum()) for gradient in own.values()) ** 0.5
    for parameter, gradient in own.items():
        assert float((mine[parameter] - gradient).norm()) < 1e-5 * max(float(gradient.norm()), 1e-3 * whole), parameter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_does_not_change_the_loss_of_real_tokens(data: Corpus, name: str) -> None:
    language, found = built(name, data)
    padded = task(data, name, pad_to_multiple=29)
    padded._uses_chunks = language._uses_chunks
    short = language.data()[0][:5]
    with torch.no_grad():
        losses = []
        for how in (language, padded):
            batch = tensors(how, [short])
            losses.append(float(how.loss(how.outputs(found, batch, EVALUATION), batch, EVALUATION).sums["next_token"]))
    assert tensors(padded, [short])["inputs"].shape == (1, 29)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_of_training_lower_the_loss(data: Corpus, name: str) -> None:
    language = task(data, name)
    rows = len(language.data())
    config = configuration(train={"steps": 4, "global_batch": rows}, optim={"kind": "adamw", "lr": 3e-3})
    done = trace(ProcessInfo(), SingleProcess(), language, config)
    assert done.losses == sorted(done.losses, reverse=True)
    assert done.losses[-1] < done.losses[0] - 0.01
    assert all(np.any(gradient) for gradient in done.gradients.values())
    assert done.gradients.keys() == done.parameters.keys()
    still = [name for name, before in done.before.items() if np.array_equal(before, done.parameters[name])]
    assert not still


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_found_out_whether_the_head_is_all_there_is_between_hidden_states_and_logits(name: str) -> None:
    torch.manual_seed(0)
    found = models.build_model(model(name), 300)
    assert models.head_is_linear(found) == ARCHITECTURES[name][2]


@pytest.mark.parametrize("cap", [5.0, 30.0, 1000.0])
def test_a_soft_cap_is_noticed_in_a_new_model_whose_logits_are_near_zero(cap: float) -> None:
    torch.manual_seed(0)
    config = model("gemma2, soft cap")
    found = models.build_model(
        config.model_copy(update={"settings": {**config.settings, "final_logit_softcapping": cap}}), 300
    )
    assert found(input_ids=torch.arange(9)[None]).logits.abs().max() < 1
    assert not models.head_is_linear(found)


def test_asking_a_model_leaves_it_as_it_was() -> None:
    found = models.build_model(model("gpt2"), 300).train()
    before = {name: value.clone() for name, value in found.state_dict().items()}
    seed = torch.get_rng_state()
    models.head_is_linear(found)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    assert all(module.training for module in found.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found.modules())
    assert torch.equal(torch.get_rng_state(), seed)


def test_weights_are_a_function_of_torchs_generator() -> None:
    first, second, third = (_seeded(seed) for seed in (1, 1, 2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def _seeded(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(models.build_model(model("llama"), 300).state_dict())


# settings that cannot be ------------------------------------------------------------------------------------------


def _config(architecture: str, **settings: Any) -> FromConfig:
    return FromConfig(kind="config", architecture=architecture, settings=settings)


@pytest.mark.parametrize(
    ("architecture", "settings", "told"),
    [
        ("llamma", {}, r"model\.architecture=llamma is not a causal .*, did you mean 'llama'\?"),
        ("42", {}, r"model\.architecture=42 is not a causal .*, e\.g\. llama, gpt2, qwen3"),
        (
            "llama",
            {"hiden_size": 3},
            r"unknown key 'model\.settings\.hiden_size' for llama, did you mean '\S+\.hidden_size'",
        ),
        ("gpt2", {"n_layers": 3}, r"'model\.settings\.n_layers' for gpt2, did you mean 'model\.settings\.n_layer'\?"),
        ("llama", {"hidden_size": "wide"}, r"model\.settings do not fit llama: .*hidden_size"),
        ("llama", {"vocab_size": 299}, r"the model has 299 token embeddings, but the tokenizer has ids up to 299"),
        ("gpt2", {"n_embd": 30, "n_head": 4}, r"a gpt2 model cannot be built with these model\.settings: .*divisible"),
    ],
)
def test_an_architecture_or_settings_that_cannot_be_are_refused(
    architecture: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        models.check_model(_config(architecture, **settings), 300)
        models.build_model(_config(architecture, **settings), 300)


def test_a_setting_goes_by_any_of_its_names_and_a_vocabulary_may_be_larger_than_the_tokenizers() -> None:
    assert models.check_model(_config("gpt2", hidden_size=48), 300).n_embd == 48
    larger = models.build_model(_config("llama", vocab_size=320, **GROUPED), 300)
    assert larger.get_input_embeddings().num_embeddings == 320


def test_an_encoder_that_looks_ahead_is_refused_with_the_remedy() -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ConfigError, match=r"BertLMHeadModel lets tokens attend to later ones.*is_decoder=true"):
        models.build_model(_config("bert", **settings), 300)
    models.build_model(_config("bert", is_decoder=True, **settings), 300)


# models from a directory ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    models.build_model(model("llama"), 300).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def pretrained(path: Path) -> Pretrained:
    return Pretrained(kind="pretrained", path=path)


def test_a_directory_is_a_model_without_memory_too(saved: Path) -> None:
    """As `unisono check` and `describe` build it, which refused every pretrained model."""
    with torch.device("meta"):
        found = models.build_model(pretrained(saved), 300)
    shapes = {name: value.shape for name, value in models.build_model(pretrained(saved), 300).named_parameters()}
    assert {name: value.shape for name, value in found.named_parameters()} == shapes
    assert all(value.is_meta and value.dtype == torch.float32 for value in found.parameters())


def test_weights_are_read_without_a_bar_where_nobody_sees_it(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    models.build_model(pretrained(saved), 300)
    assert (capfd.readouterr().err, logging.is_progress_bar_enabled()) == ("", True)


def test_a_directory_gives_its_own_weights_in_fp32(saved: Path) -> None:
    half = {name: value.bfloat16() for name, value in load_file(saved / "model.safetensors").items()}
    save_file(half, saved / "model.safetensors", metadata={"format": "pt"})
    found = models.build_model(pretrained(saved), 300).state_dict()
    assert found.keys() == half.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, half[name].float()), name


def test_a_model_larger_than_a_file_is_read_from_its_shards(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")
    models.build_model(pretrained(saved), 300).save_pretrained(saved.parent / "shards", max_shard_size="40KB")
    assert len(list((saved.parent / "shards").glob("*.safetensors"))) > 1
    found = models.build_model(pretrained(saved.parent / "shards"), 300).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"model\.path: .* has no config\.json"),
        ("{", r"model\.path: .*config\.json cannot be read"),
        ("{}", r"model\.path: .*config\.json cannot be read"),
        ('{"model_type": "unheard_of"}', r"model\.path: .*config\.json cannot be read"),
        ('{"model_type": "llama", "vocab_size": "x"}', r"model\.path: .*config\.json cannot be read"),
        ('{"model_type": "t5", "vocab_size": 300}', r"model\.path"),
    ],
)
def test_a_directory_without_a_causal_model_s_config_is_refused(saved: Path, content: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere is not a directory; .*config\.json and safetensors"):
        models.check_model(pretrained(saved / "nowhere"), 300)
    with pytest.raises(ConfigError, match=r"the model has 300 token embeddings, but the tokenizer has ids up to 300"):
        models.check_model(pretrained(saved), 301)
    (saved / "config.json").unlink()
    if content is not None:
        (saved / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        models.build_model(pretrained(saved), 300)


def test_a_directory_without_safetensors_is_refused_with_the_reason(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"has no \*\.safetensors files; other formats are not read, since they can run code"
    ):
        models.check_model(pretrained(saved), 300)


def test_a_pickle_is_not_read_even_beside_safetensors(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").rename(saved / "adapter.safetensors")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(ConfigError, match=r"model\.path: the weights in .* cannot be read"):
        models.build_model(pretrained(saved), 300)


@pytest.mark.parametrize("length", [0, 1000, None])
def test_damaged_weights_and_those_of_another_shape_are_a_config_error(saved: Path, length: int | None) -> None:
    content = (saved / "model.safetensors").read_bytes()
    if length is None:
        _with_weights(saved, **{"model.norm.weight": torch.ones(7)})
    else:
        (saved / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(ConfigError, match=r"model\.path: the weights in .* cannot be read"):
        models.build_model(pretrained(saved), 300)


def test_missing_weights_are_refused_instead_of_made_up(saved: Path) -> None:
    _with_weights(saved, **{"model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None})
    told = r"lacks 2 of the model's weights, first 'model\.layers\.1\.mlp\.up_proj\.weight'; they would be random"
    with pytest.raises(ConfigError, match=told):
        models.build_model(pretrained(saved), 300)


def _with_weights(saved: Path, **changed: torch.Tensor | None) -> None:
    weights = {**load_file(saved / "model.safetensors"), **changed}
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})


def test_a_saved_model_is_trained_with_the_tokenizer_beside_it(saved: Path, data: Corpus) -> None:
    from unisono_language.task import Language

    language = task(data)
    shutil.copyfile(language.tokenizer.path, saved / "tokenizer.json")
    language = Language(language.config, model=pretrained(saved), data=data)
    assert language.tokenizer.size == 300
    assert language.tokenizer.first == language.tokenizer.last == 0
    assert store_in(language).manifest["units"] == store_in(task(data)).manifest["units"]


# FLOPs ------------------------------------------------------------------------------------------------------------


def recipe(name: str) -> RunConfig:
    return load("language", [f"model={name}"])[0]


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny", "qwen3_tiny", "moe_tiny"])
def test_the_flops_of_a_batch_are_those_that_torch_counts(name: str) -> None:
    """Rows without padding, and plain attention: what the counter sees are the products of matrices."""
    rows, length, vocabulary = 2, 192, 1024
    found = models.build_untrained(recipe(name).model, vocabulary)
    ids = torch.randint(vocabulary, (rows, length))
    with FlopCounterMode(display=False) as counter:
        found(input_ids=ids, labels=ids).loss.backward()
    constant, per_length = models.flops_per_token(found)
    assert rows * (constant * length + per_length * length**2) == pytest.approx(counter.get_total_flops(), rel=0.01)
    with torch.device("meta"):  # which needs only the shapes
        assert models.flops_per_token(models.build_untrained(recipe(name).model, vocabulary)) == (constant, per_length)


def test_the_models_of_the_recipe_are_as_tied_as_they_say() -> None:
    tied = {}
    for name in ("llama_tiny", "gpt2_tiny", "qwen3_tiny", "moe_tiny"):
        found = models.build_untrained(recipe(name).model, 512)
        tied[name] = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert tied == {"llama_tiny": True, "gpt2_tiny": True, "qwen3_tiny": False, "moe_tiny": True}


def test_a_tied_head_counts_once_and_an_embedding_not_at_all() -> None:
    tied, untied = (models.build_untrained(model(f"qwen3, {kind}"), 300) for kind in ("tied", "untied"))
    assert models.flops_per_token(tied) == models.flops_per_token(untied)


def test_no_model_is_made_while_threads_prepare_batches(data: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one changes torch's default dtype for all threads, and a run in fp64 would notice."""
    made, untrained = [], models.build_untrained
    monkeypatch.setattr(models, "build_untrained", lambda *a: made.append(threading.current_thread()) or untrained(*a))
    config = configuration(train={"steps": 2, "global_batch": 4}).model_copy(update={"data": data})
    trace(ProcessInfo(), SingleProcess(), task(data), config)
    assert len(made) == 2  # one for the shapes, one to train
    assert set(made) == {threading.main_thread()}


def test_the_work_of_a_batch_leaves_padding_out(data: Corpus) -> None:
    language = task(data, pad_to_multiple=64)
    rows = [np.arange(5), np.arange(17), np.arange(2)]
    work = language.work(language.collate(rows))
    constant, per_length = models.flops_per_token(models.build_untrained(model("llama, tied"), 300))
    assert work == {
        "tokens": 21.0, "flops": 21 * constant + per_length * (16 + 256 + 1), "weight_flops": 21 * constant / 3,
    }  # fmt: skip


def test_with_adapters_frozen_weights_count_no_gradients() -> None:
    """What torch counts under LoRA: 4 per weight and token, not 6, and adapters beside, which are left out.

    The first layer's input needs no gradient, so three of its matrices cost 2 less than is counted.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    rows, length, vocabulary, rank = 2, 192, 1024, 2
    plain = models.build_untrained(recipe("llama_tiny").model, vocabulary)
    constant, per_length = models.flops_per_token(plain)
    tokens = rows * length
    ours = StepResult(0.0, {}, {}, {
        "flops": tokens * (constant + per_length * length), "weight_flops": tokens * constant / 3,
    })  # fmt: skip
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0))
    trained = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    first = plain.model.layers[0].self_attn
    unneeded = sum(getattr(first, name).weight.numel() for name in ("q_proj", "k_proj", "v_proj"))
    ids = torch.randint(vocabulary, (rows, length))
    with FlopCounterMode(display=False) as counter:
        adapted(input_ids=ids, labels=ids).loss.backward()
    counted = counter.get_total_flops() - tokens * (6 * trained - 2 * unneeded)
    assert ours.flops(adapters=True) == pytest.approx(counted, rel=0.01)
    assert ours.flops(adapters=False) > 1.3 * ours.flops(adapters=True)


def test_targets_that_are_padding_are_the_same_everywhere() -> None:
    from unisono.engines.torch.losses import linear_cross_entropy

    assert IGNORED == linear_cross_entropy.IGNORED == -100


def test_whoever_gives_a_pickle_is_told_the_command_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for path, out in ((tmp_path, "DIR"), (tmp_path / "pytorch_model.bin", "pytorch_model.safetensors")):
        with pytest.raises(ConfigError, match=f"looks like a pickle.*`unisono import {path} out={out}`"):
            models.check_model(Pretrained(kind="pretrained", path=path), 10)
