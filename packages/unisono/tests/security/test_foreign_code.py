"""Nothing that a run, a checkpoint or a store brings along is imported, unless the user says so."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import unisono
from packages.unisono.tests.checkpoint.saved import save
from packages.unisono.tests.security.runs import stranger
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.exchange import hf_config
from unisono.checkpoint.remote import description, store_lock
from unisono.checkpoint.remote.object_store import ObjectError, ObjectStore
from unisono.checkpoint.remote.restore import Restore
from unisono.checkpoint.remote.upload_process import CheckpointUploader
from unisono.cli import main
from unisono.config.code import foreign_run
from unisono.config.code.foreign_run import TrustError
from unisono.data.audit import audit
from unisono.launch.resolving import layout, resolve
from unisono.launch.trained.replay import replay
from unisono.launch.trained.run import evaluate
from unisono.runtime.errors import RunError, UnisonoError
from unisono.task_config import load_config, read_run


def ours(run: Path, *words: str) -> Any:
    """The configuration of the command that goes on with the stranger's run."""
    found = [
        f"run.dir={run.parent}", f"run.name={run.name}", "train.steps=2", "train.global_batch=8",
        "layout.world_size=1", "layout.micro_batch=4",
    ]  # fmt: skip
    return layout.resolve_layout(load_config("packages.unisono.tests.tasks:LinearTask", [*found, *words])[0], None)


# the task of a run ----------------------------------------------------------------------------------------------------


def test_a_start_on_a_stranger_s_run_compares_its_configuration_and_imports_nothing(tmp_path: Path) -> None:
    run, touched = stranger(tmp_path)
    with pytest.raises(RunError, match=r"another run:\n  recipe: .*evil\.py:Evil"):
        resolve.plan_run(ours(run))
    assert not touched.exists()
    run, touched = stranger(tmp_path / "other", reference="packages.unisono.tests.tasks:LinearTask")
    assert (
        resolve.plan_run(ours(run)).config.recipe == "packages.unisono.tests.tasks:LinearTask"
    )  # else the refusal above says nothing


USES: dict[str, Callable[..., Any]] = {
    "evaluate": evaluate,
    "replay": replay,
    "audit": audit,
    "load_model": unisono.load_model,
    "open_run": unisono.open_run,
}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path]:
    made, touched = stranger(tmp_path)
    for step in (1, 2):
        save(made / "checkpoints", step)
    (made / "ledger").mkdir()
    (made / "ledger" / "rank-00000.jsonl").write_text("")
    return made, touched


@pytest.mark.parametrize("use", USES)
def test_a_verb_on_a_stranger_s_run_names_the_file_and_its_owner_and_imports_nothing(
    run: tuple[Path, Path], use: str
) -> None:
    folder, touched = run
    evil = folder / "assets" / "evil.py"
    evil.chmod(0o666)
    with pytest.raises(TrustError, match="--trust") as caught:
        USES[use](folder)
    assert str(evil) in str(caught.value) and f"owner {foreign_run.owner_name(os.getuid())}" in str(caught.value)
    assert "writable by its group and anybody" in str(caught.value)
    assert not touched.exists()


@pytest.mark.parametrize("use", USES)
def test_the_task_may_come_from_the_command_and_the_run_s_own_is_then_ignored(run: tuple[Path, Path], use: str) -> None:
    folder, touched = run
    try:
        USES[use](folder, task="packages.unisono.tests.tasks:LinearTask")
    except TrustError:
        raise
    except (UnisonoError, KeyError, AttributeError):
        pass  # its checkpoint is of another model; what matters is what was imported on the way
    assert not touched.exists()


def test_an_explicit_word_imports_what_the_run_names(run: tuple[Path, Path]) -> None:
    folder, touched = run
    assert read_run(folder, trust=True).recipe.endswith("evil.py:Evil")
    assert touched.exists(), "the file that is never imported does nothing, and the tests here show nothing"
    assert read_run(folder).recipe.endswith("evil.py:Evil")  # this process has it by now


@pytest.mark.parametrize("verb", [["evaluate"], ["replay"], ["data", "audit"], ["predict"], ["generate"]])
def test_no_pipe_answers_for_the_user(run: tuple[Path, Path], verb: list[str]) -> None:
    folder, touched = run
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *verb, str(folder)], input="y\nyes\n" * 20, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert (done.returncode, touched.exists()) == (2, False)
    assert "--trust" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "reference",
    ["this:Zen", "os:system", "../evil.py:Evil", "evil.py:Evil", "no such.py:\x1b[2J", ":x", "x", "a:b:c", "é.py:X"],
)
def test_any_reference_of_a_stranger_is_only_shown(
    tmp_path: Path, reference: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, touched = stranger(tmp_path, reference=reference)
    save(run / "checkpoints", 1)
    monkeypatch.chdir(run / "assets")
    assert main.main(["evaluate", str(run)]) == 2
    told = capsys.readouterr().err
    assert not touched.exists() and "\x1b" not in told and "this" not in sys.modules


def test_a_packaged_recipe_needs_no_word(tmp_path: Path, spirals: Path) -> None:
    for number, name in enumerate(("spirals", "spirals.task:Spirals")):
        run, _ = stranger(tmp_path / str(number), reference=name)
        assert foreign_run.resolve_task(run) == name


# what a store brings --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store in which a stranger's run lies whole."""
    monkeypatch.setattr(store_lock, "HEARTBEAT_TIMEOUT", 0.02)
    run, _ = stranger(tmp_path / "there")
    (run / "assets" / "inner").mkdir()
    (run / "assets" / "inner" / "x.json").write_text("{}")
    save(run / "checkpoints", 1)
    found = ObjectStore(f"file://{tmp_path}/store/run")
    store_lock.claim(found, run)
    path = commit.find_checkpoints(run / "checkpoints")[-1]
    CheckpointUploader(found, run, None, Retention(9)).commit(path, path.name, commit.read_manifest(path).files)
    return found


def _lie(store: ObjectStore, **files: bytes) -> None:
    """Have `run.json` name more files than an honest one does."""
    described = json.loads(store.get("run.json") or b"")
    for name, content in files.items():
        sha256 = hashlib.sha256(content).hexdigest()
        store.put(f"description/{sha256[:16]}/{name}", content)
        described[name] = {"size": len(content), "sha256": sha256}
    store.put("run.json", json.dumps(described).encode())


def _begin(store: ObjectStore, here: Path) -> None:
    here.mkdir()
    Restore(store, here).begin(False, nullcontext)


STRANGE = (
    "assets/evil.py", "assets/a/b.so", "evil.py", "checkpoints/x", "assets/.hidden", "ledger/x", "assets/a\x1b[2J.py",
)  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_data_of_a_run_is_left_out_of_a_restore(
    store: ObjectStore, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _lie(store, **{name: b"import os"})
    _begin(store, tmp_path / "here")
    assert (tmp_path / "here" / "config.yaml").is_file()
    assert not os.path.lexists(tmp_path / "here" / name)
    told = capsys.readouterr().err
    assert "is neither a run record nor a data file" in told and "\x1b" not in told


@pytest.mark.parametrize(
    "name", ["../evil.py", "/tmp/evil.json", "assets/../../x.json", "assets\\..\\x.json", "C:x.json"]
)
def test_a_store_that_names_files_elsewhere_brings_nothing(store: ObjectStore, tmp_path: Path, name: str) -> None:
    _lie(store, **{name: b"{}"}) if not name.startswith(("/", "..")) else store.put(
        "run.json", json.dumps({name: {"size": 2, "sha256": "0" * 64}}).encode()
    )
    with pytest.raises(ObjectError, match="lies outside"):
        _begin(store, tmp_path / "here")
    assert not (tmp_path / "here" / "config.yaml").exists()


def test_a_restore_writes_through_no_link(store: ObjectStore, tmp_path: Path) -> None:
    here, outside = tmp_path / "here", tmp_path / "outside"
    outside.mkdir()
    (here / "assets").mkdir(parents=True)
    (here / "assets" / "inner").symlink_to(outside)
    with pytest.raises(UnisonoError, match="is a link"):
        Restore(store, here).begin(False, nullcontext)
    assert not list(outside.iterdir())


def test_a_restored_configuration_decides_nothing_of_the_next_start(store: ObjectStore, tmp_path: Path) -> None:
    _begin(store, tmp_path / "here")
    touched = tmp_path / "there" / "touched"
    with pytest.raises(RunError, match="recipe"):
        resolve.plan_run(ours(tmp_path / "here"))
    assert not touched.exists()


def test_an_asset_that_is_not_the_checkpoint_s_is_left_out_of_a_restore(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _lie(store, **{"assets/config.json": b'{"model_type": "another"}'})
    _begin(store, tmp_path / "here")
    assert not (tmp_path / "here" / "assets" / "config.json").exists()
    assert (
        "'assets/config.json', which is not the file with which the checkpoint was written" in capsys.readouterr().err
    )


def test_an_upload_says_what_it_leaves_out(tmp_path: Path) -> None:
    run, _ = stranger(tmp_path)
    (run / "assets" / "tokenizer.json").write_text("{}")
    (run / "assets" / "key").symlink_to("/etc/passwd")
    assert description.find_skipped_assets(run) == ["assets/evil.py"]
    assert sorted(description.files(run)) == ["assets/tokenizer.json", "config.yaml"]


# transformers ---------------------------------------------------------------------------------------------------------

AUTO = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def _foreign(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    touched = folder.parent / "touched"
    (folder / "evil.py").write_text(
        f"open({str(touched)!r}, 'w')\nfrom transformers import LlamaConfig as EvilConfig, LlamaForCausalLM as "
        "EvilModel\n"
    )
    (folder / "config.json").write_text(json.dumps({**LLAMA, **settings}))
    return folder


def test_a_configuration_that_names_code_is_read_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    folder = _foreign(
        tmp_path / "model", auto_map=AUTO, attn_implementation="evil/kernels", _auto_class="AutoConfig",
        transformers_weights="../../secret.safetensors", text_config={"auto_map": AUTO},
    )  # fmt: skip
    config = hf_config.read_config(folder)
    assert type(config).__module__.startswith("transformers.") and not hasattr(config, "auto_map")
    assert config._attn_implementation is None and not hasattr(config, "transformers_weights")
    assert "dropped auto_map, attn_implementation" in caplog.text and "text_config.auto_map" in caplog.text
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow
def test_an_architecture_that_only_its_own_code_knows_is_refused_whatever_a_pipe_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = _foreign(tmp_path / "model", auto_map=AUTO, model_type="evil")
    code = (
        "from pathlib import Path\nfrom unisono.checkpoint.exchange import hf_config\n"
        f"hf_config.read_config(Path({str(folder)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], input="y\n" * 9, capture_output=True, text=True, check=False)
    assert "the installed transformers has no architecture model_type=" in done.stderr
    assert not (tmp_path / "touched").exists()
    code = f"from transformers import AutoConfig\nAutoConfig.from_pretrained({str(folder)!r})"
    bare = subprocess.run([sys.executable, "-c", code], input="y\n" * 9, capture_output=True, text=True, check=False)
    assert (tmp_path / "touched").exists(), (
        f"the library asks the pipe no more, and this test shows nothing: {bare.stderr}"
    )


def test_a_setting_takes_no_method_s_place(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UnisonoError, match="llama has no setting 'save_pretrained'"):
        hf_config.read_config(_foreign(tmp_path / "model", save_pretrained="x"))


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_local_experts"])
def test_a_model_of_a_million_parts_is_refused_before_it_is_built(tmp_path: Path, name: str) -> None:
    """A `config.json` of 200 bytes took minutes, and gigabytes for modules without content."""
    pytest.importorskip("transformers")
    with pytest.raises(UnisonoError, match=f"{name}=1000000 is more than any model has"):
        hf_config.read_config(_foreign(tmp_path / "model", **{name: 10**6}))


def test_what_is_copied_for_others_names_no_code_either(tmp_path: Path) -> None:
    folder = _foreign(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}, "a": 1}))
    (folder / "vocab.json").write_text(json.dumps({"auto_map": 3}))
    (folder / "special_tokens_map.json").symlink_to("/etc/passwd")
    out = tmp_path / "out"
    out.mkdir()
    hf_config.copy_settings(folder, "tokenizer_config.json", out)
    hf_config.copy_settings(folder, "vocab.json", out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"a": 1}
    assert json.loads((out / "vocab.json").read_text()) == {"auto_map": 3}, "a token is no setting"
    with pytest.raises(UnisonoError, match="is a link"):
        hf_config.copy_settings(folder, "special_tokens_map.json", out)
