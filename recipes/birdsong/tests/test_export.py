"""An exported encoder: two files that give the same embeddings, and are never put into an encoder of other settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("equinox")

import equinox as eqx
import jax

from recipes.birdsong.tests.small import ENCODER, task
from unisono import ConfigError, DataError, RunError
from unisono_birdsong import export as exported
from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.settings import EncoderSettings

SETTINGS = EncoderSettings.model_validate(ENCODER)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(SETTINGS, jax.random.key(3))


def test_a_loaded_encoder_gives_the_same_embeddings(encoder: Encoder, tmp_path: Path) -> None:
    size = exported.write_encoder(encoder, tmp_path / "enc", {"step": 7})
    loaded = exported.load_encoder(tmp_path / "enc", SETTINGS)
    clip = np.random.default_rng(0).normal(size=(SETTINGS.frames, SETTINGS.mels)).astype(np.float32)
    wanted = np.asarray(encoder.embedding(clip))
    assert np.abs(wanted).max() > 0
    np.testing.assert_array_equal(np.asarray(loaded.embedding(clip)), wanted)
    assert exported.digest(loaded) == exported.digest(encoder)
    assert size == sum(leaf.size for leaf in jax.tree_util.tree_leaves(eqx.filter(encoder, eqx.is_array)))
    assert exported.digest(Encoder(SETTINGS, jax.random.key(4))) != exported.digest(encoder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["enc", "encoder.json", "encoder.safetensors"]
    with pytest.raises(RunError, match="is there already, and nothing is overwritten"):
        exported.write_encoder(encoder, tmp_path / "enc", {})


def test_a_process_that_computes_in_fp64_has_the_same_encoder(encoder: Encoder, tmp_path: Path) -> None:
    exported.write_encoder(encoder, tmp_path / "enc", {})
    with jax.enable_x64(True):
        wide = jax.tree_util.tree_map(lambda leaf: leaf.astype("float64") if eqx.is_array(leaf) else leaf, encoder)
        assert {array.dtype.name for array in exported.named_arrays(wide).values()} == {"float64"}
        assert exported.digest(wide) == exported.digest(encoder)
        assert exported.digest(exported.load_encoder(tmp_path / "enc", SETTINGS)) == exported.digest(encoder)


def test_another_encoder_is_refused_with_every_setting_that_differs(encoder: Encoder, tmp_path: Path) -> None:
    exported.write_encoder(encoder, tmp_path / "enc", {})
    other = EncoderSettings.model_validate({**ENCODER, "qk_norm": False, "sound": {**ENCODER["sound"], "mean": -5.0}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as told:
        exported.load_encoder(tmp_path / "enc", other)
    assert "model.sound.mean=-7.2 there and -5.0 here, model.qk_norm=true there and false here" in str(told.value)
    assert str(told.value).endswith("Set model.sound.mean=-7.2 model.qk_norm=true, or train one of these settings")
    # the same shapes all through: nothing else would have noticed
    arrays = exported.named_arrays(encoder)
    assert exported.fill(Encoder(SETTINGS, jax.random.key(0)), arrays, "here").settings == SETTINGS
    with pytest.raises(ConfigError, match=r"model\.width=16 there and 32 here"):
        exported.load_encoder(tmp_path / "enc", SETTINGS.model_copy(update={"width": 32}))


def test_damaged_and_foreign_folders_are_refused(encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "enc"
    exported.write_encoder(encoder, folder, {})
    with pytest.raises(DataError, match=r"nowhere is not an exported encoder \(no encoder.json\)$"):
        exported.load_encoder(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("recipe: birdsong")
    with pytest.raises(DataError, match=r"it is a run: unisono export .*run out=DIR"):
        exported.load_encoder(tmp_path / "run")
    weights = bytearray((folder / exported.WEIGHTS).read_bytes())
    weights[-3] ^= 1
    (folder / exported.WEIGHTS).write_bytes(weights)
    with pytest.raises(DataError, match=r"the weights have the digest .*; export them again"):
        exported.load_encoder(folder)
    (folder / exported.WEIGHTS).write_bytes(b"none")
    with pytest.raises(DataError, match=r"encoder.safetensors cannot be read"):
        exported.load_encoder(folder)
    told = json.loads((folder / exported.SETTINGS).read_text())
    (folder / exported.SETTINGS).write_text(json.dumps({**told, "format": "another"}))
    with pytest.raises(DataError, match="has the format 'another'"):
        exported.load_encoder(folder)
    (folder / exported.SETTINGS).write_text(json.dumps({**told, "settings": {"width": -1}}))
    with pytest.raises(DataError, match="does not describe an encoder"):
        exported.load_encoder(folder)


def test_training_begins_with_exported_weights_and_a_fresh_head(encoder: Encoder, tmp_path: Path) -> None:
    exported.write_encoder(encoder, tmp_path / "enc", {})
    begun = task("supervised", weights=str(tmp_path / "enc"))
    begun.check()
    begun.setup()
    built = jax.jit(begun.build)(jax.random.key(0))
    fresh = jax.jit(task("supervised").build)(jax.random.key(0))
    assert exported.digest(built.encoder) == exported.digest(encoder) != exported.digest(fresh.encoder)
    np.testing.assert_array_equal(built.probe.output.weight, fresh.probe.output.weight)
    with pytest.raises(ConfigError, match=r"holds another encoder: model.depth=2 there and 3 here"):
        task("supervised", model={"depth": 3}, weights=str(tmp_path / "enc")).check()
