"""Attacks through a run, a checkpoint or a store that somebody else created."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from unisono.checkpoint.core import manifest
from unisono.config import CONFIG_FILE
from unisono.data.sources import open_source
from unisono.runtime.errors import UnisonoError
from unisono.runtime.untrusted.hdf5 import check_hdf5
from unisono.supervise import fault_hook
from unisono_faults import job
from unisono_faults.matrix import REFUSED, AbstainError, Outcome, Sandbox, scenario

TASK = f"{job.TASK}:Small"


def _write_evil_task(folder: Path, touched: Path) -> Path:
    """Write a task into the assets of a run that leaves a file when it is imported."""
    evil = folder / "assets" / "evil.py"
    evil.parent.mkdir(exist_ok=True)
    evil.write_text(f"from pathlib import Path\nPath({str(touched)!r}).touch()\nfrom faulty import Small\n")
    return evil


@scenario("S7", "a restored run whose config.yaml names a Python file from the store")
def _restored_code(sandbox: Sandbox) -> Outcome:
    outcome, touched = Outcome(), sandbox.folder / "touched"
    url = f"checkpoint.upload.url=file://{sandbox.folder}/store"
    newest = sandbox.train_to_end(url)
    run, store = newest.parents[1], sandbox.folder / "store" / job.RUN
    evil = _write_evil_task(run, touched)
    values = yaml.safe_load((run / CONFIG_FILE).read_text()) | {"recipe": f"{evil}:Small"}
    _write_description(store, {CONFIG_FILE: yaml.safe_dump(values).encode(), "assets/evil.py": evil.read_bytes()})
    for path in store.glob("checkpoints/*/manifest.json"):  # so that the start asks config.yaml for the micro-batch
        job.rewrite_manifest(path.parent, lambda old: {**old, "state": {**old["state"], "random": False}})
    shutil.rmtree(run)
    done = sandbox.run(url)
    outcome.check("restored step-" in done.output, f"it was not restored: {done.code}: {done.output[-800:]}")
    outcome.check(not touched.exists(), "the file was imported")
    outcome.check(not evil.exists(), "the file was restored")
    outcome.message = done.line_with("assets/evil.py")
    outcome.check(bool(outcome.message), f"it is missing from the output: {done.output[-800:]}")
    return outcome


@scenario("S7b", "evaluate, replay and data audit of a run that brings its own Python file")
def _foreign_run(sandbox: Sandbox) -> Outcome:
    outcome, touched = Outcome(), sandbox.folder / "touched"
    run = sandbox.train_to_end().parents[1]
    evil = _write_evil_task(run, touched)
    values = yaml.safe_load((run / CONFIG_FILE).read_text()) | {"recipe": f"{evil}:Small"}
    (run / CONFIG_FILE).write_text(yaml.safe_dump(values))
    for verb in (["evaluate"], ["replay"], ["data", "audit"]):
        outcome.expect(sandbox.run_verb(*verb, str(run), answers=True), REFUSED, "--trust", name=f"{verb}")
        outcome.check(not touched.exists(), f"{verb} imported it")
        done = sandbox.run_verb(*verb, str(run), "--task", TASK)
        outcome.expect(done, 0, name=f"{verb} with the user's own task")
        outcome.check(not touched.exists(), f"{verb} imported it, though a task was given")
    sandbox.run_verb("evaluate", str(run), "--trust")
    outcome.check(touched.exists(), "the file does nothing, so the test is vacuous")
    return outcome


@scenario("S7c", "a config.json with auto_map to Python files, and `yes` piped to every prompt")
def _auto_map(sandbox: Sandbox) -> Outcome:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        raise AbstainError("needs transformers: pip install 'unisono[language]'") from None
    outcome, touched = Outcome(), sandbox.folder / "touched"
    run = sandbox.train_to_end().parents[1]
    _write_evil_task(run, touched)
    code = {"AutoConfig": "evil.Small", "AutoModelForCausalLM": "evil.Small"}
    (run / "assets" / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    outcome.expect(sandbox.run_verb("export", str(run), answers=True), REFUSED)
    outcome.check(not touched.exists(), "it was imported")
    command = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(run / 'assets')!r})"
    sandbox.run(command=["sh", "-c", 'yes | "$0" "$@"', sys.executable, "-c", command])
    outcome.check(touched.exists(), "the library would not have imported it either, so the test is vacuous")
    return outcome


@scenario("S9", "a leftover fault variable, and terminal escape sequences in a run's events")
def _left_overs(sandbox: Sandbox) -> Outcome:
    before, outcome = sandbox.reference_digests(), Outcome()
    trained = sandbox.run(variables={fault_hook.VARIABLE: "rank=0,step=2,phase=compute,act=die"})
    outcome.compare(trained, before)
    with (trained.run / "events.jsonl").open("a") as events:
        hostile = {"error": "lost\x1b[2J\x1b]0;x\x07", "rank": "0\nunisono: all is well", "step": 2**70}
        events.write(f"{json.dumps(hostile)}\n{'[' * 100_000}\n")
    done = sandbox.run_verb("diagnose", str(trained.run))
    outcome.check("Traceback" not in done.output and "\x1b" not in done.output, f"diagnose: {done.output[-800:]!r}")
    outcome.check("unisono: all is well" not in done.output.splitlines(), "a record wrote a line of its own")
    outcome.message = next(iter(done.output.splitlines()), "")
    return outcome


@scenario("S13", "code running in the process that reads a pickle: private keys, the launcher's variables")
def _pickle_process(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    (sandbox.folder / "key").write_text("secret")
    weights = sandbox.folder / "weights.pt"
    weights.write_text("weights")
    missing, free = _try_to_escape(sandbox, weights, enter=False)
    outcome.check(all(free.values()), f"these are not possible outside either, so the test is vacuous: {free}")
    missing, shut = _try_to_escape(sandbox, weights, enter=True)
    if missing:
        raise AbstainError(f"this host lacks {', '.join(missing)}, of which `unisono import` warns")
    outcome.check(shut.pop("read the weights"), "it cannot read the given file")
    outcome.check(not any(shut.values()), f"possible: {', '.join(name for name, can in shut.items() if can)}")
    outcome.message = f"permission denied: {', '.join(shut)}"
    return outcome


_ESCAPES = """
import json, os, socket, sys
from unisono.checkpoint.exchange import sandbox
folder, weights, parent, enter = sys.argv[1:]
missing = sandbox.enter([weights]) if enter else []
tries = {
    "read a key": lambda: open(f"{folder}/key").read(),
    "write a file": lambda: open(f"{folder}/new", "w").close(),
    "read the launcher's variables": lambda: open(f"/proc/{parent}/environ").read(),
    "open a socket": lambda: socket.socket(socket.AF_UNIX).close(),
    "signal the launcher": lambda: os.kill(int(parent), 0),
    "start a process": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "read the weights": lambda: open(weights).read(),
}
done = {}
for name, act in tries.items():
    try:
        act()
        done[name] = True
    except PermissionError:
        done[name] = False
print(json.dumps([missing, done]))
"""


def _try_to_escape(sandbox: Sandbox, weights: Path, *, enter: bool) -> tuple[list[str], dict[str, bool]]:
    """Return the protections that this host lacks, and which actions succeed; with or without the sandbox."""
    words = [str(sandbox.folder), str(weights), str(os.getpid()), "yes" if enter else ""]
    done = subprocess.run([sys.executable, "-c", _ESCAPES, *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr)
    missing, can = json.loads(done.stdout)
    return missing, can


@scenario("S11", "a configuration with exponential references, and a 9 GB manifest")
def _bombs(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    newest = sandbox.train_to_end()
    lines = [f"v{level}: ${{v{level + 1}}}${{v{level + 1}}}" for level in range(30)]
    (sandbox.folder / "mine.yaml").write_text("\n".join(["defaults: [language, _self_]", *lines, "v30: x"]))
    began = time.monotonic()
    outcome.expect(sandbox.run_verb("check", "mine", f"--config-dir={sandbox.folder}"), REFUSED, "references")
    with (newest / manifest.NAME).open("r+b") as file:
        file.truncate(9 << 30)
    outcome.expect(
        sandbox.run_verb("evaluate", f"runs/{job.RUN}", "--task", TASK), REFUSED, "at most", name="the manifest"
    )
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


@scenario("S12", "a run asset changed after its checkpoint was written")
def _changed_asset(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    newest = sandbox.train_to_end()
    asset = newest.parents[1] / "assets" / "config.json"
    asset.write_text("{}")
    for verb in ("evaluate", "predict", "export"):
        task = ["--task", TASK] if verb != "export" else []
        outcome.expect(sandbox.run_verb(verb, f"runs/{job.RUN}", *task), REFUSED, asset.name, name=verb)
    asset.unlink()
    done = sandbox.run_verb("evaluate", f"runs/{job.RUN}", "--task", TASK)
    outcome.expect(done, 0, name="evaluate, with the assets as they were,")
    return outcome


@scenario(
    "S14", "files that point elsewhere: a symlink in assets, a pipe in a checkpoint, a split named ../, an HDF5 link"
)
def _paths_elsewhere(sandbox: Sandbox) -> Outcome:
    outcome, folder = Outcome(), sandbox.folder / "theirs"
    newest = sandbox.train_to_end()
    run, out = newest.parents[1], sandbox.folder / "exported"
    secret = sandbox.folder / "id_rsa"
    secret.write_text("PRIVATE KEY")
    asset = run / "assets" / "config.json"
    asset.symlink_to(secret)
    outcome.expect(sandbox.run_verb("export", f"runs/{job.RUN}", f"out={out}"), REFUSED, asset.name, name="a link")
    asset.unlink()
    piece = next(iter(newest.glob("*.safetensors")))
    content = piece.read_bytes()
    piece.unlink()
    os.mkfifo(piece)
    outcome.expect(sandbox.run_verb("export", f"runs/{job.RUN}", f"out={out}"), REFUSED, piece.name, name="a pipe")
    piece.unlink()
    piece.write_bytes(content)
    outcome.check(not out.exists() or "PRIVATE" not in str([*map(Path.read_bytes, out.rglob("*.*"))]), "it was copied")
    folder.mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["../secrets"]}')
    outcome.message = _read_expecting_error(outcome, "a split", lambda: open_source(folder))
    with suppress(ImportError):
        import h5py

        with h5py.File(folder / "a.h5", "w") as file:
            file["ids"] = h5py.ExternalLink(str(secret), "/ids")
        _read_expecting_error(outcome, "an HDF5 link", lambda: check_hdf5(folder / "a.h5"))
    return outcome


def _read_expecting_error(outcome: Outcome, name: str, read: Callable[[], object]) -> str:
    """Return the message with which a reader refuses a file."""
    try:
        read()
    except UnisonoError as error:
        return str(error)
    outcome.check(False, f"{name} was followed")
    return ""


def _write_description(store: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a store and list them in its `run.json`."""
    description = json.loads((store / "run.json").read_text())
    for name, content in files.items():
        sha256 = hashlib.sha256(content).hexdigest()
        path = store / "description" / sha256[:16] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        description[name] = {"size": len(content), "sha256": sha256}
    (store / "run.json").write_text(json.dumps(description))


@scenario("S10", "a checkpoint moved to an archive, with a symlink in its place")
def _moved_checkpoint(sandbox: Sandbox) -> Outcome:
    words = ("checkpoint.keep=1",)
    before, outcome = sandbox.reference_digests(*words), Outcome()
    newest = sandbox.train_to_end(*words, "run.stop_after=6")
    archive = sandbox.folder / "archive"
    newest.rename(archive)
    newest.symlink_to(archive)
    done = sandbox.run(*words)
    outcome.compare(done, before)
    names = [path.name for path in (done.run / "checkpoints").iterdir()]
    outcome.check(names == ["step-00000012"], f"these checkpoints remain: {names}")
    outcome.check((archive / "manifest.json").is_file(), "the archive was removed")
    outcome.message = "the symlink is removed when it is due; the archive stays; later saves succeed"
    return outcome
