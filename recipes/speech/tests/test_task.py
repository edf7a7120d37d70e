"""The task: its loss is transformers' own, and a micro-batch without audio is as good as any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.speech.tests import made
from unisono import ConfigError, Context, count_parameters
from unisono.config.schema.run import Lora
from unisono.engines.torch.lora import Adapter
from unisono_speech.data.labels import IGNORED
from unisono_speech.data.samples import Conversation, Message
from unisono_speech.settings import Embedded, KMeans, Pretrained, SpeechConfig
from unisono_speech.task import Speech

TRAINING = Context(0, training=True)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return made.task(tmp_path_factory.mktemp("cache"))


def model_of(task: Speech) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.build().double()


def test_the_loss_of_a_sample_is_that_of_transformers(task: Speech) -> None:
    model = model_of(task)
    [row] = made.rows(task, 1)
    batch = {name: torch.from_numpy(value) for name, value in task.collate([row]).items()}
    loss = task.loss(task.outputs(model, batch, TRAINING), batch, TRAINING)
    counts = task.counts(task.collate([row]))
    ours = sum(loss.weights[name] * value / counts[name] for name, value in loss.sums.items())
    theirs = model(
        input_ids=torch.from_numpy(row.ids)[None], audio_input_ids=torch.from_numpy(row.frames)[None],
        audio_input_ids_mask=torch.ones(1, len(row.frames), dtype=torch.bool),
        labels=torch.from_numpy(row.text_labels)[None], audio_labels=torch.from_numpy(row.audio_labels)[None],
    ).loss  # fmt: skip
    assert float(theirs) > 5
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_padding_changes_nothing(task: Speech) -> None:
    model = model_of(task)
    rows = made.rows(task, 3)
    together = task.outputs(model, {n: torch.from_numpy(v) for n, v in task.collate(rows).items()}, TRAINING)
    for number, row in enumerate(rows):
        alone = task.outputs(model, {n: torch.from_numpy(v) for n, v in task.collate([row]).items()}, TRAINING)
        torch.testing.assert_close(together["nats"][number], alone["nats"][0], rtol=1e-6, atol=0)


def test_a_micro_batch_without_audio_is_exact_and_reaches_every_parameter(task: Speech) -> None:
    model = model_of(task)
    silent = Conversation("text", (Message("user", ("hello",)), Message("assistant", ("hi there",))), 1)
    batch = task.collate([task.sample(silent, None)])  # type: ignore[arg-type]
    assert task.counts(batch) == {"text": 9.0, **{f"codebook_{number}": 0.0 for number in range(8)}}
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    loss = task.loss(task.outputs(model, tensors, TRAINING), tensors, TRAINING)
    assert float(loss.sums["text"]) > 1
    assert all(float(loss.sums[f"codebook_{number}"]) == 0 for number in range(8))
    sum(loss.sums.values()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert float(gradients["text_lm_head.weight"].abs().sum()) > 0
    assert float(gradients["audio_lm_head.weight"].abs().sum()) == 0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def test_counts_are_of_the_batch_alone_and_every_codebook_has_its_own(task: Speech) -> None:
    batch = task.collate(made.rows(task, 3))
    counts = task.counts(batch)
    assert set(counts) == {"text", *task.audio_terms}
    assert counts["codebook_3"] == (batch["audio"][..., 3] != IGNORED).sum() > 0


def test_a_reference_is_of_the_same_voice_another_one_in_each_epoch_and_never_held_out(task: Speech) -> None:
    from unisono import SampleContext, generator

    record = task.data()[0]
    held_out = {sample.clip for sample in (task.held_out()[n] for n in range(len(task.held_out())))}
    heard = set()
    for epoch in range(12):
        talk = task.library.conversation(record, SampleContext(generator("epoch", epoch), True))
        reference, target = talk.clips
        assert target == record.clip != reference
        assert reference.voice[0] == target.voice[0] and reference not in held_out
        heard.add(reference)
    assert len(heard) > 1
    kept = task.held_out()[0]
    twice = [task.library.conversation(kept, SampleContext(generator("any", n), False)) for n in range(2)]
    assert twice[0] == twice[1]


def test_weights_of_terms_are_checked_against_the_codec(task: Speech) -> None:
    given = Speech(SpeechConfig(audio_weights=[1.0, 0.5]), model=task.model_config, data=task.data_config)
    with pytest.raises(ConfigError, match="2 weights, and the codec 8 codebooks"):
        given.check()
    given = Speech(SpeechConfig(audio_weights=0.0, text_weight=0.0), model=task.model_config, data=task.data_config)
    with pytest.raises(ConfigError, match="nothing to learn"):
        given.check()
    bare = Speech(SpeechConfig(text_weight=0.0), model=task.model_config, data=task.data_config)
    assert bare.build().text_lm_head is None
    assert "text" not in bare.counts(bare.collate(made.rows(bare, 1)))


def test_an_unknown_setting_of_the_model_is_refused(task: Speech) -> None:
    for settings, text in (
        ({"hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"codebook_size": 8}, "follows from tokenizer and codec"),
    ):
        wrong = task.model_config.model_copy(update={"settings": settings})
        with pytest.raises(ConfigError, match=text):
            Speech(SpeechConfig(), model=wrong, data=task.data_config).check()


def test_a_shrunk_task_has_the_same_data_and_fewer_parameters(task: Speech) -> None:
    assert task.shrink(10**9) is None
    wide = task.model_config.model_copy(update={"settings": {**made.SMALL, "hidden_size": 64}})
    large = Speech(SpeechConfig(), model=wide, data=task.data_config)
    small = large.shrink(10_000)
    assert small is not None
    assert count_parameters(small.build) < count_parameters(large.build)
    assert np.array_equal(made.rows(small, 1)[0].ids, made.rows(large, 1)[0].ids)


def test_terms_are_weighed_as_the_settings_say(task: Speech) -> None:
    weights = [2.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 3.0]
    given = Speech(SpeechConfig(audio_weights=weights, text_weight=0.5), model=task.model_config, data=task.data_config)
    batch = {name: torch.from_numpy(value) for name, value in given.collate(made.rows(given, 2)).items()}
    loss = given.loss(given.outputs(model_of(given), batch, TRAINING), batch, TRAINING)
    assert loss.weights == {"text": 0.5, **{f"codebook_{number}": weight for number, weight in enumerate(weights)}}
    assert all(float(loss.sums[f"codebook_{number}"]) > 1 for number in range(8))


def test_bfloat16_computes_nearly_the_same(task: Speech) -> None:
    model = model_of(task).float()
    batch = made.batch(task, 2)
    exact = task.outputs(model, batch, TRAINING)["nats"]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = task.outputs(model, batch, TRAINING)["nats"]
    assert bool((exact != rounded).any())
    torch.testing.assert_close(rounded.float(), exact.float(), rtol=0.05, atol=0.05)


def test_a_pretrained_model_is_refused_with_the_codec_of_another(task: Speech, tmp_path: Path) -> None:
    """Its codes would mean other sounds: more or fewer entries, or as many that were fitted on other recordings."""
    base = tmp_path / "base"
    task.build().save_pretrained(base)
    task.tokens.save(base)
    group = Pretrained(kind="pretrained", path=base)

    def pretrained(codec: KMeans, speakers: int = 2) -> Speech:
        data = Embedded(kind="embedded", speakers=speakers, clips=4, codec=codec, cache=tmp_path / "cache")
        return Speech(SpeechConfig(text_weight=0.0), model=group, data=data)

    with pytest.raises(ConfigError, match="codes are 0 to 7, and the codec's 0 to 15"):
        pretrained(made.CODEC.model_copy(update={"codes": 16})).check()
    other = pretrained(made.CODEC, speakers=3)
    with pytest.raises(ConfigError, match="was trained with the codec"):
        other.check()
    task.codec.save(base)
    again = pretrained(made.CODEC, speakers=3)
    again.check()
    assert again.codec.digest == task.codec.digest != other.codec.digest


def test_adapters_leave_the_heads_out_unless_they_are_named(task: Speech) -> None:
    def adapted(**settings: Any) -> set[str]:
        model = model_of(task)
        Adapter(Lora(kind="lora", **settings), model, seed=0)
        return {name.partition(".lora_A")[0] for name, value in model.named_parameters() if "lora_A" in name}

    chosen = adapted()
    assert chosen and not [name for name in chosen if "lm_head" in name]
    named = adapted(targets=["*_proj", "audio_lm_head"])
    assert [name.rpartition(".")[2] for name in named if "lm_head" in name] == ["audio_lm_head"]
