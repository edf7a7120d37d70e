"""What lies beside the weights of a local model is read by transformers, so it is looked at before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unisono.checkpoint.exchange import hf_config
from unisono.runtime.errors import ConfigError


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    return folder


def test_adapters_beside_any_model_are_refused(tmp_path: Path) -> None:
    """Only the recipe `language` looked: elsewhere the library loaded the model that their file named."""
    folder = model(tmp_path / "m")
    (folder / "adapter_config.json").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"has adapters next to its model \(adapter_config.json\)"):
        hf_config.open_folder(folder, "model.path")


@pytest.mark.parametrize(("kind", "told"), [("pipe", "is a pipe"), ("link", "is a link"), ("holes", "has 5368709120 ")])
def test_settings_of_generation_are_a_file_of_the_folder(tmp_path: Path, kind: str, told: str) -> None:
    """The library waited for ever for a pipe, followed links, and read gigabytes of holes."""
    path = model(tmp_path / "m") / "generation_config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.touch()
        os.truncate(path, 5 << 30)
    with pytest.raises(ConfigError, match=rf"model.path: .*generation_config.json {told}"):
        hf_config.open_folder(path.parent, "model.path")


def test_settings_of_adapters_are_copied_without_modules_that_they_name(tmp_path: Path) -> None:
    """PEFT imports them."""
    modules = {"auto_mapping": {"parent_library": "evil"}, "megatron_core": "evil"}
    values = {"r": 10**9, "target_modules": "(a+)+$", **modules}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    (tmp_path / "out").mkdir()
    hf_config.copy_settings(tmp_path, "adapter_config.json", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == {
        "r": 10**9, "target_modules": "(a+)+$"
    }  # fmt: skip


def test_what_peft_writes_of_every_adapter_is_no_code_of_its_author(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was warned of `megatron_core`, which names Megatron by default."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"auto_mapping": None, "megatron_core": "megatron.core"}))
    assert hf_config.read_settings(tmp_path, "adapter_config.json") == {}
    assert caplog.messages == []


def test_of_settings_of_generation_nothing_is_said_to_be_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library reads the file itself, with all that is in it."""
    folder = model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 9, "attn_implementation": "a/kernel"}))
    hf_config.open_folder(folder, "model.path")
    assert caplog.messages == []
