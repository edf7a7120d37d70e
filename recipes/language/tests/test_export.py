"""What a run of the language recipe is for transformers and PEFT, and that it comes back as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import unisono
from recipes.language.tests import corpora
from recipes.language.tests.corpora import GROUPED, sentences, trained, write_jsonl
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.checkpoint.exchange.export import _plan_model, find_checkpoint, read_adapter_settings, write
from unisono.checkpoint.exchange.hf_shards import ShardedFiles
from unisono.cli import main
from unisono.config.schema.verbs import Export
from unisono.engines.torch.lora import Adapter
from unisono.engines.torch.state import saved_tensors
from unisono.engines.torch.state.sharded_tensors import load, model_tensors
from unisono.runtime.errors import ConfigError, Preempted
from unisono.task_config import read_run
from unisono_language.data.tokenizer import Tokenizer
from unisono_language.model import build_model
from unisono_language.settings import Pretrained

TOKENS = torch.arange(3, 67).reshape(2, 32)
QUIET = {"bos_token_id": None, "eos_token_id": None}  # else the defaults lie outside of a small vocabulary
EXPERTS = {
    **GROUPED, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_jsonl(folder / "corpus" / "a.jsonl", sentences(30))
    return folder


def train(folder: Path, name: str, **settings: Any) -> Path:
    path: Path = trained(folder, name, **settings).folder
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A tied llama with an average, and checkpoints of two steps."""
    return train(folder, "tied", **{"ema.decay": 0.5, "checkpoint.every": 1, "checkpoint.keep": 2})


def exported(run: Path, out: Path, *words: str) -> Path:
    assert main.main(["export", str(run), f"out={out}", *words]) == 0
    return out


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(TOKENS).logits
    return result


def of_transformers(path: Path, **more: Any) -> Any:
    how = {"output_loading_info": True, "experts_implementation": "eager", **more}
    model, report = AutoModelForCausalLM.from_pretrained(path, **how)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def own(run: Path, ema: bool = False, step: int | None = None) -> Any:
    """The model with the run's weights, put there by the existing way, with the kernels of transformers' own choice."""
    config = AutoConfig.from_pretrained(run / "assets")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    unisono.load_weights(run, model, ema=ema, step=step)
    return model


MODELS = {
    "gpt2_tiny": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3_tiny": {**GROUPED, "head_dim": 8, "tie_word_embeddings": False},
    "moe_tiny": EXPERTS,
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits_bit_for_bit(folder: Path, tmp_path: Path, name: str) -> None:
    run = train(folder, name, model=name, **{"model.settings": MODELS[name], "train.steps": 1})
    again = of_transformers(exported(run, tmp_path / "out", "shard_mb=0.03"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    mine = logits(own(run))
    assert mine.std() > 0
    assert torch.equal(logits(again), mine)


WRITTEN = {**corpora.ARCHITECTURES, "mixture": ("qwen3_moe", EXPERTS, True)}


@pytest.mark.parametrize("name", WRITTEN)
def test_tensors_have_the_names_and_cuts_with_which_transformers_writes_them(tmp_path: Path, name: str) -> None:
    architecture, settings, _ = WRITTEN[name]
    config = AutoConfig.for_model(architecture, **{"vocab_size": 300, **QUIET, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    model.save_pretrained(tmp_path / "theirs")
    config.save_pretrained(tmp_path / "assets")
    plan = _plan_model(model, tmp_path, Export(shard_mb=0.05))
    assert len(plan.files) > 1
    (tmp_path / "mine").mkdir()
    write(plan, tmp_path / "mine", {file.name for file in plan.files})
    mine = {n: t for file in plan.files for n, t in load_file(tmp_path / "mine" / file.name).items()}
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for tensor, value in theirs.items():
        assert torch.equal(mine[tensor], value), tensor


def test_a_tied_model_is_written_once_and_loads_tied(run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out")
    assert not any(entry.name.startswith("lm_head") for entry in ShardedFiles(out).entries)
    again = of_transformers(out)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(own(run)))
    fresh = AutoModelForCausalLM.from_config(again.config)
    assert not torch.equal(logits(fresh), logits(again)), "any model would do"


def test_the_folder_has_all_that_transformers_wants(run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out", "shard_mb=0.02")
    names = {path.name for path in out.iterdir()}
    count = len(list(out.glob("*.safetensors")))
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names >= {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {entry.name for entry in ShardedFiles(out).entries}
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert "use_cache" not in config or config["use_cache"]
    mine = Tokenizer.load(run / "assets")
    theirs = AutoTokenizer.from_pretrained(out)
    text = "abc def <|endoftext|> gh é"
    assert theirs(text).input_ids == mine.encode([text])[0].tolist()[:-1]
    assert theirs.eos_token_id == mine.last
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (mine.first, mine.last)


@pytest.mark.parametrize("tokenizer", ["its own", "given, adds nothing", "given, adds an end"])
def test_transformers_continues_a_prompt_of_an_export_as_generate_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    """The claim: with the token that began every document of the training, and no other."""
    more: dict[str, Any] = {}
    if tokenizer != "its own":
        words = sorted({word for text in sentences(30) for word in text.split()})
        given = corpora.word_level(
            tmp_path / "given", {"<s>": 0, "</s>": 1, **{word: n + 2 for n, word in enumerate(words)}},
            bos_token="<s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast", add_bos_token=False,
        )  # fmt: skip
        engine = Engine.from_file(str(given / "tokenizer.json"))
        engine.add_special_tokens(["<s>", "</s>"])
        if tokenizer == "given, adds an end":
            engine.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
        engine.save(str(given / "tokenizer.json"))
        more = {"data.tokenizer": str(given)}
    run = train(folder, f"prompted {tokenizer}".replace(" ", "_").replace(",", ""), **{"train.steps": 20, **more})
    out = exported(run, tmp_path / "out")
    theirs, model = AutoTokenizer.from_pretrained(out), of_transformers(out)
    mine, prompt = Tokenizer.load(run / "assets"), " ".join(sentences(1)[0].split()[:2])
    inputs = theirs(prompt, return_tensors="pt")
    assert mine.first is not None
    assert inputs.input_ids[0].tolist() == mine.encode([prompt])[0].tolist()[:-1]
    assert inputs.input_ids[0, 0] == mine.first
    made = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=12, do_sample=False)
    capsys.readouterr()
    assert main.main(["generate", str(run), prompt, "tokens=12"]) == 0
    assert capsys.readouterr().out == theirs.decode(made[0], skip_special_tokens=True) + "\n"


def test_the_average_an_older_step_and_another_dtype_can_be_chosen(run: Path, tmp_path: Path) -> None:
    weights = logits(own(run))
    averaged = of_transformers(exported(run, tmp_path / "ema", "ema=true"))
    assert torch.equal(logits(averaged), logits(own(run, ema=True)))
    assert not torch.equal(logits(averaged), weights)
    first = of_transformers(exported(run, tmp_path / "first", "step=1"))
    assert torch.equal(logits(first), logits(own(run, step=1)))
    assert not torch.equal(logits(first), weights)
    half = of_transformers(exported(run, tmp_path / "half", "dtype=bf16"))
    assert half.dtype == torch.bfloat16
    assert torch.equal(logits(half), logits(of_transformers(exported(run, tmp_path / "whole"), dtype=torch.bfloat16)))


@pytest.mark.parametrize("name", ["tied", pytest.param("moe_tiny", marks=pytest.mark.slow)])
def test_processes_write_the_same_bytes_as_one(folder: Path, run: Path, tmp_path: Path, name: str) -> None:
    if name != "tied":  # whose stacked experts are cut
        run = train(folder, "experts", model=name, **{"model.settings": EXPERTS, "train.steps": 1})
    one = exported(run, tmp_path / "one", "shard_mb=0.02", "processes=1")
    two = exported(run, tmp_path / "two", "shard_mb=0.02", "processes=2")
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in two.iterdir())
    assert len(files) > 5
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_run_that_begins_from_an_export_has_its_tensors_bit_for_bit(folder: Path, run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out", "shard_mb=0.02")
    model = build_model(Pretrained(kind="pretrained", path=out), 300)
    mine = dict(own(run).named_parameters())
    for name, value in model.named_parameters():
        assert torch.equal(value, mine.pop(name))
    assert not mine
    again = train(folder, "again", model="pretrained", **{"model.path": str(out), "train.steps": 1, "optim.lr": 1e-9})
    assert (again / "assets" / "tokenizer_config.json").is_file()
    exported(again, tmp_path / "twice")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "twice" / name).read_text()) == json.loads((out / name).read_text())


def test_an_export_imported_into_one_file_is_the_commit_bit_for_bit(run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out", "shard_mb=0.02")
    assert main.main(["import", str(out), f"out={tmp_path / 'one.safetensors'}"]) == 0
    found = load_file(tmp_path / "one.safetensors")
    saved_as = commit.read_manifest(find_checkpoint(run))
    reader = ArrayReader(saved_as.path, saved_as.arrays)
    saved = {name.removeprefix("model/"): shape for name, shape in reader.shapes.items() if name.startswith("model/")}
    assert found.keys() == saved.keys()
    for name, shape in saved.items():
        assert torch.equal(found[name], saved_tensors.read_tensor(reader, f"model/{name}", (0,) * len(shape), shape))


# adapters -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(folder: Path, run: Path) -> Path:
    """Adapters on the exported llama."""
    pytest.importorskip("peft", reason="peft is not installed")
    out = folder / "base"
    exported(run, out)
    lora = {"adapter": "lora", "adapter.rank": 4, "adapter.alpha": 12.0, "adapter.targets": ["q_proj", "*.1.mlp.*"]}
    return train(folder, "lora", model="pretrained", **{"model.path": str(out), "train.steps": 3, **lora})


def test_adapters_load_in_peft_and_give_the_same_logits_bit_for_bit(adapted: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    out = exported(adapted, tmp_path / "out")
    assert {path.name for path in out.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    config = read_run(adapted, trust=True)
    base = of_transformers(config.model.path)
    plain = logits(base)
    theirs = logits(PeftModel.from_pretrained(base, out))
    mine: Any = of_transformers(config.model.path)
    adapters = Adapter(read_adapter_settings(adapted), mine, seed=5)
    saved = commit.read_manifest(find_checkpoint(adapted))
    load(adapters.select_saved(model_tensors(mine)), ArrayReader(saved.path, saved.arrays), kinds=("model/",))
    assert torch.equal(theirs, logits(mine))
    assert not torch.equal(theirs, plain)


def test_merged_adapters_are_one_model_of_transformers(adapted: Path, tmp_path: Path) -> None:
    out = exported(adapted, tmp_path / "out", "merge=true")
    merged: Any = unisono.load_model(adapted)
    for name, value in of_transformers(out).named_parameters():
        assert torch.equal(value, merged.get_parameter(name)), name


# refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["step=7"], "has no checkpoint of step 7; available steps: 1 to 2"),
        (["merge=true"], "has no adapters to merge"),
        (["to=onxx"], "to: input should be 'hf', 'safetensors' or 'onnx', got 'onxx'"),
        (["stpe=1"], "unknown word 'stpe=1', did you mean 'step'?"),
        (["shard_mb=0"], "shard_mb: input should be greater than 0"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(
    run: Path, tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}", *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_the_one_of_the_assets_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    config = json.loads((copy / "assets" / "config.json").read_text())
    (copy / "assets" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    corpora.sign_assets(copy)
    assert main.main(["export", str(copy), f"out={tmp_path / 'out'}"]) == 2
    assert "the run's arrays do not match LlamaForCausalLM" in capsys.readouterr().err
    (copy / "assets" / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    corpora.sign_assets(copy)
    assert main.main(["export", str(copy), f"out={tmp_path / 'out'}"]) == 2
    assert "has shape (48, 32) in the run, but (50, 32) in LlamaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# at the end of a run ------------------------------------------------------------------------------------------------


def test_a_run_ends_with_what_transformers_loads(folder: Path) -> None:
    """The claim: `checkpoint.final=hf` writes what `unisono export` writes, beside a checkpoint that can be resumed."""
    run = train(folder, "final", **{"checkpoint.final": "hf"})
    made = run / "exports" / "step-00000002-hf"
    again = exported(run, folder / "again")
    assert {path.name for path in made.iterdir()} == {path.name for path in again.iterdir()}
    assert all((made / path.name).read_bytes() == path.read_bytes() for path in again.iterdir())
    assert train(folder, "final", **{"checkpoint.final": "hf", "train.steps": 3}) == run
    assert (run / "exports" / "step-00000003-hf" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_process_writes_files_of_the_export_at_the_end(folder: Path, strategy: str) -> None:
    layout = {"layout.world_size": 2, "layout.strategy": strategy, "train.global_batch": 4}
    run = train(folder, strategy, **{"checkpoint.final": "hf", **layout})
    made = run / "exports" / "step-00000002-hf"
    assert len(list(made.glob("*.safetensors"))) >= 2
    assert json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, unisono.load_model(run)(input_ids=TOKENS).logits)


@pytest.mark.slow
def test_a_preempted_run_leaves_what_transformers_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim: a run that is asked to end by a signal saves, exports what it saved, and can be resumed."""
    (folder / "preempting.py").write_text(
        "import os, signal, unisono\n\n\nclass Preempt(unisono.Callback):\n    def on_step(self, step, values):\n"
        "        if step == 1:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    words = {"checkpoint.final": "hf", "train.steps": 200, "callbacks": [f"{folder / 'preempting.py'}:Preempt"]}
    with pytest.raises(Preempted):
        train(folder, "preempted", **words)
    (made,) = (folder / "runs" / "preempted" / "exports").iterdir()
    assert AutoModelForCausalLM.from_pretrained(made).config.model_type == "llama"
    assert made.name.startswith("step-") and made.name < "step-00000200"


PLAIN = """
import numpy as np, torch, unisono


class Plain(unisono.Task):
    def data(self):
        return [{"x": np.ones(2, dtype=np.float32)}] * 4

    def build(self):
        return torch.nn.Linear(2, 1)

    def outputs(self, model, batch, context):
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        return unisono.Loss({"square": outputs.square().sum()})
"""


def test_a_task_without_a_configuration_cannot_end_with_an_export(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    with pytest.raises(ConfigError, match=r"saves no config.json"):
        unisono.train(f"{tmp_path / 'plain.py'}:Plain", {
            "train.steps": 1, "train.global_batch": 4, "checkpoint.final": "hf",
            "run.dir": str(tmp_path), "run.name": "a", "layout.world_size": 1, "observe.progress": False,
        })  # fmt: skip


def test_arrays_that_fit_no_configuration_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """The claim: what the export at the end would refuse, e.g. for a model within another, is refused at the start."""
    saves = """
    def save_assets(self, directory):
        import transformers

        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8).save_pretrained(directory)
"""
    (tmp_path / "wrapped.py").write_text(PLAIN.replace("class Plain", "class Wrapped") + saves)
    with pytest.raises(ConfigError, match=r"checkpoint.final=hf: the run's arrays do not match GPT2LMHeadModel"):
        unisono.train(f"{tmp_path / 'wrapped.py'}:Wrapped", {
            "train.steps": 1, "train.global_batch": 4, "checkpoint.final": "hf", "checkpoint.every": 1,
            "run.dir": str(tmp_path), "run.name": "a", "layout.world_size": 1, "observe.progress": False,
        })  # fmt: skip
    assert not (tmp_path / "a" / "checkpoints").exists()
