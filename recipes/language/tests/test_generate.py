"""What a trained run writes, from its own folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Engine
from transformers import AutoConfig, AutoModelForCausalLM

import unisono
from recipes.language.tests.corpora import BY_HEART, KNOWN, TEXTS, sentences, sign_assets, trained, write_jsonl
from unisono.cli import main
from unisono.engines.torch import devices
from unisono.runtime.errors import ConfigError, DataError, RunError
from unisono_language.generate import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned three sentences by heart, and whose corpus and cache are gone."""
    folder = tmp_path_factory.mktemp("generate")
    write_jsonl(folder / "corpus" / "a.jsonl", TEXTS)
    result = trained(folder, **BY_HEART)
    assert result.loss < 0.2
    shutil.rmtree(folder / "corpus")
    shutil.rmtree(folder / "cache")
    return result.folder


def written_by(folder: Path, prompt: str, **how: Any) -> str:
    return generate(unisono.open_run(folder), prompt, **how)


def written(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main.main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_it_continues_what_the_run_has_learned_and_stops_at_the_end_of_the_document(run: Path) -> None:
    assert written_by(run, "the quick") == KNOWN
    assert written_by(run, "pack my box") == TEXTS[1]
    assert written_by(run, "") in TEXTS  # an empty prompt begins a document
    assert written_by(run, "the quick", temperature=0.01, seed=1) == KNOWN  # nearly greedy


def test_it_writes_as_many_tokens_as_were_asked_for(run: Path) -> None:
    engine = Engine.from_file(str(run / "assets" / "tokenizer.json"))
    ids = engine.encode(KNOWN).ids
    prompt, three = engine.decode(ids[:4]), engine.decode(ids[:7])
    assert engine.encode(prompt).ids == ids[:4]
    assert written_by(run, prompt, tokens=3) == three


def test_the_greedy_choice_is_the_likeliest_token_each_time(run: Path) -> None:
    """Without the library's loop and without its cache of keys and values."""
    engine = Engine.from_file(str(run / "assets" / "tokenizer.json"))
    found = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "assets"))
    unisono.load_weights(run, found)
    found.eval()
    prompt = "zebras quietly"
    ids = [0, *engine.encode(prompt).ids]
    for _ in range(12):
        ids.append(int(found(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == 0:
            break
    assert written_by(run, prompt, tokens=12) == engine.decode(ids)


def test_documents_that_are_given_are_predicted_as_the_run_would_read_them(run: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [*TEXTS, "zebras quietly vex a jumbled quorum"])
    words = [f"data.path={tmp_path / 'corpus'}", f"data.cache={tmp_path / 'cache'}"]
    assert main.main(["predict", str(run), "rows=training", f"out={tmp_path / 'p.csv'}", *words]) == 0
    nats = [float(row["nats_per_target"]) for row in unisono.open_source(tmp_path / "p.csv", key="out")]
    assert max(nats[:3]) < 0.3 and nats[3] > 2  # another tokenizer than the run's would find all of them unlikely


def test_a_local_model_without_a_run_is_continued_and_evaluated_as_the_run_that_it_was_exported_from(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims: `generate` and `evaluate` take a folder of Hugging Face; `evaluate` takes settings as words."""
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}"]) == 0
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    capsys.readouterr()
    assert written(capsys, tmp_path / "out", "the quick") == written(capsys, run, "the quick") == KNOWN + "\n"
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [*TEXTS, *sentences(20)])
    words = [
        "data=corpus", f"data.path={tmp_path / 'corpus'}", f"data.cache={tmp_path / 'cache'}", "data.held_out=0.5",
        "task.sequence=64", "layout.threads=1",
    ]  # fmt: skip
    found = []
    for folder in (run, tmp_path / "out"):
        capsys.readouterr()
        assert main.main(["evaluate", str(folder), *words]) == 0
        found.append(dict(line.split(": ") for line in capsys.readouterr().out.splitlines()))
    assert (found[0].pop("step"), found[1].pop("step")) == ("60", "0")
    mine, its = ({name: float(value) for name, value in values.items()} for values in found)
    assert mine == pytest.approx(its, rel=1e-6, abs=2e-6)
    assert mine["loss"] > 2, "sentences that it never saw"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    assert main.main(["evaluate", str(tmp_path / "out"), "data.pth=x"]) == 2
    assert "unknown key 'data.pth'" in capsys.readouterr().err
    assert main.main(["generate", str(tmp_path / "out"), "the", "ema=true"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_the_model_is_on_the_accelerator_that_there_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim: `generate` used the CPU beside an idle GPU; `meta` stands in for one."""
    monkeypatch.setattr(devices, "accelerators", lambda: ("meta", 1))
    opened = unisono.open_run(run)
    assert opened.load_model(device="auto").device.type == "meta"
    assert opened.load_model().device.type == opened.load_model(device="cpu").device.type == "cpu"
    with pytest.raises(ConfigError, match="device=cuda: this host has 1 × meta"):
        opened.load_model(device="cuda")


def test_the_command_prints_the_same_every_time_and_as_many_tokens_as_it_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(capsys, run, "sphinx of") == written(capsys, run, "sphinx of") == TEXTS[2] + "\n"
    short, long = (written(capsys, run, "the quick", f"tokens={count}") for count in (2, 5))
    assert len(short) < len(long)
    assert KNOWN.startswith(short.strip("\n"))


def test_a_temperature_draws_and_its_seed_decides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(seed: int) -> str:
        return written(capsys, run, "the", "temperature=3", f"seed={seed}", "tokens=20")

    texts = [drawn(seed) for seed in range(4)]
    assert texts == [drawn(seed) for seed in range(4)]
    assert len(set(texts)) == 4
    assert all(text.startswith("the") for text in texts)


def test_tokens_are_drawn_from_the_whole_vocabulary(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own default would be the 50 likeliest."""
    chances, draw = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *a, **k: chances.append(p) or draw(p, *a, **k))
    written_by(run, "the quick", tokens=2, temperature=100)
    assert [int((chance > 0).sum()) for chance in chances] == [300, 300]


# refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), [("tokens", 0), ("tokens", -3), ("temperature", -1)])
def test_numbers_that_mean_nothing_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], option: str, value: int
) -> None:
    assert main.main(["generate", str(run), "the", f"{option}={value}"]) == 2
    assert f"unisono: error: {option}={value}" in capsys.readouterr().err


def test_an_empty_prompt_is_refused_where_no_token_begins_a_document(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "assets" / "special_tokens.json").write_text(json.dumps({"first": None, "last": None}))
    sign_assets(copy)
    with pytest.raises(RunError, match="prompt"):
        written_by(copy, "")
    assert written_by(copy, "the quick", tokens=3).startswith("the quick")


def test_damaged_assets_are_named(run: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "special_tokens.json"):
        copy = Path(shutil.copytree(run, tmp_path / name))
        (copy / "assets" / name).write_text("{")
        sign_assets(copy)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            written_by(copy, "the")
