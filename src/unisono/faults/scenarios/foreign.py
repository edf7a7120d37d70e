"""What a run, a checkpoint or a store that somebody else has made can do to whoever uses it."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from unisono.checkpoint.core import manifest
from unisono.faults import job
from unisono.faults.job import Done
from unisono.faults.matrix import Abstain, Ground, Outcome, fault

TASK = f"{job.TASK}:Small"


def _evil(folder: Path, touched: Path) -> Path:
    """A task that tells when it was imported, among the assets of a run."""
    evil = folder / "assets" / "evil.py"
    evil.parent.mkdir(exist_ok=True)
    evil.write_text(f"from pathlib import Path\nPath({str(touched)!r}).touch()\nfrom harmed import Small\n")
    return evil


def _finish(ground: Ground, *words: str, answers: bool = False) -> Done:
    """A verb to its end; with `answers` a pipe says yes to whatever it asks."""
    command = job.verb(*words)
    if answers:
        command = ["sh", "-c", 'yes | "$0" "$@"', *command]
    with ground.job(command=command) as running:
        return running.finish(120)


@fault("S7", "a store whose run.json brings a Python file, and whose config.yaml names it as the task")
def _restored_code(ground: Ground) -> Outcome:
    outcome, touched = Outcome(), ground.own / "touched"
    url = f"checkpoint.upload.url=file://{ground.own}/store"
    newest = job.finished(ground, url)
    run, store = newest.parents[1], ground.own / "store" / job.RUN
    evil = _evil(run, touched)
    values = yaml.safe_load((run / "config.yaml").read_text()) | {"recipe": f"{evil}:Small"}
    _describe(store, {"config.yaml": yaml.safe_dump(values).encode(), "assets/evil.py": evil.read_bytes()})
    for path in store.glob("checkpoints/*/manifest.json"):  # so that the start asks config.yaml for the micro-batch
        content = json.loads(path.read_text())
        content["state"]["random"] = False
        path.write_bytes(manifest.dumps({name: value for name, value in content.items() if name != "sha256"}))
    shutil.rmtree(run)
    with ground.job(url) as again:
        done = again.finish()
    outcome.promise("restored step-" in done.said, f"it was not restored: {done.code}: {done.said[-800:]}")
    outcome.promise(not touched.exists(), "the file was imported")
    outcome.promise(not evil.exists(), "the file was brought")
    outcome.promise("assets/evil.py" in done.said, f"it is not said: {done.said[-800:]}")
    outcome.said = next((line for line in done.said.splitlines() if "evil.py" in line), "")
    return outcome


@fault("S7b", "a run whose config.yaml names a Python file of its own, given to evaluate, replay and data audit")
def _foreign_run(ground: Ground) -> Outcome:
    outcome, touched = Outcome(), ground.own / "touched"
    run = job.finished(ground).parents[1]
    evil = _evil(run, touched)
    values = yaml.safe_load((run / "config.yaml").read_text()) | {"recipe": f"{evil}:Small"}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    for verb in (["evaluate"], ["replay"], ["data", "audit"]):
        done = _finish(ground, *verb, str(run), answers=True)
        outcome.promise(done.code == 2 and "--trust" in done.said, f"{verb}: {done.code}: {done.said[-800:]}")
        outcome.promise(not touched.exists(), f"{verb} imported it")
        outcome.said = done.sentence
        done = _finish(ground, *verb, str(run), "--task", TASK)
        outcome.promise(done.code == 0, f"{verb} with the user's own task: {done.code}: {done.said[-800:]}")
        outcome.promise(not touched.exists(), f"{verb} imported it, though a task was given")
    _finish(ground, "evaluate", str(run), "--trust")
    outcome.promise(touched.exists(), "the file does nothing, so nothing was shown")
    return outcome


@fault("S7c", "a config.json whose auto_map names Python files, and a pipe that says yes to every question")
def _auto_map(ground: Ground) -> Outcome:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        raise Abstain("needs transformers: pip install 'unisono[language]'") from None
    outcome, touched = Outcome(), ground.own / "touched"
    run = job.finished(ground).parents[1]
    _evil(run, touched)
    code = {"AutoConfig": "evil.Small", "AutoModelForCausalLM": "evil.Small"}
    (run / "assets" / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    done = _finish(ground, "export", str(run), answers=True)
    outcome.promise(done.code == 2, f"{done.code}: {done.said[-800:]}")
    outcome.promise(not touched.exists(), "it was imported")
    outcome.said = done.sentence
    command = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(run / 'assets')!r})"
    with ground.job(command=["sh", "-c", 'yes | "$0" "$@"', sys.executable, "-c", command]) as bare:
        bare.finish(120)
    outcome.promise(touched.exists(), "the library would not have imported it either, so nothing was shown")
    return outcome


def _describe(store: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a store as `run.json` names them."""
    described = json.loads((store / "run.json").read_text())
    for name, content in files.items():
        sha256 = hashlib.sha256(content).hexdigest()
        path = store / "description" / sha256[:16] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        described[name] = {"size": len(content), "sha256": sha256}
    (store / "run.json").write_text(json.dumps(described))


@fault("S10", "a checkpoint that was moved to an archive, with a link left in its place")
def _moved_checkpoint(ground: Ground) -> Outcome:
    words = ("checkpoint.keep=1",)
    before, outcome = ground.unharmed(*words), Outcome()
    newest = job.finished(ground, *words, "run.stop_after=6")
    archive = ground.own / "archive"
    newest.rename(archive)
    newest.symlink_to(archive)
    with ground.job(*words) as run:
        done = run.finish()
    outcome.promise(done.code == 0, f"a later save was stopped: {done.code}: {done.said[-800:]}")
    left = [path.name for path in (run.run / "checkpoints").iterdir()]
    outcome.promise(left == ["step-00000012"], f"{left} are there")
    outcome.promise((archive / "manifest.json").is_file(), "the archive was removed")
    outcome.exact = done.code == 0 and job.state(run.run) == before
    outcome.promise(bool(outcome.exact), "it ended otherwise")
    outcome.said = "the link goes when it is due, the archive stays, and every later save is made"
    return outcome
