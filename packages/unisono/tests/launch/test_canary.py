"""Secrets are put wherever a user may have them; every file that runs and proofs write is searched for them."""

from __future__ import annotations

import gzip
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs

pytestmark = pytest.mark.slow
CANARY = "canary5f0c9d1e7a"
TASK = f'''
import logging
import os

from small import Small


class Leaky(Small):
    """A task that is careless with what it knows."""

    def facts(self):
        return {{"source": "https://me:{CANARY}1@example.org/rows", "api_key": "{CANARY}2"}}

    def outputs(self, model, batch, context):
        token = os.environ["HF_TOKEN"]
        logging.getLogger("unisono.leaky").warning("reading https://me:{CANARY}3@example.org with %s", token)
        if context.step == 3 and os.environ.get("FAIL"):
            raise RuntimeError(f"403 for https://me:{CANARY}4@example.org/?token={CANARY}5 with {{token}}")
        return super().outputs(model, batch, context)
'''
SECRETS = {
    name: f"{CANARY}-{name.lower()}"
    for name in (
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "DB_PASSWORD",
        "GITHUB_TOKEN", "OPENAI_API_KEY",
    )
} | {"DATABASE_URL": f"postgresql://me:{CANARY}6@db/x", "HTTPS_PROXY": f"http://me:{CANARY}7@127.0.0.1:9"}  # fmt: skip


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    """A folder with code, in a repository whose remote has a password, and a home."""
    code = tmp_path / "code"
    code.mkdir()
    jobs.task_file(code)
    (code / "leaky.py").write_text(TASK)
    subprocess.run(["git", "init", "-q"], cwd=code, check=True)
    remote = f"https://me:{CANARY}8@example.org/code.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=code, check=True)
    (tmp_path / "home").mkdir()
    return tmp_path


def unisono(ground: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    home = ground / "home"
    places = {"HOME": home, "XDG_CACHE_HOME": home / "cache", "HF_HOME": home / "hf", "TRACKIO_DIR": home / "trackio",
              "WANDB_CACHE_DIR": home / "w1", "WANDB_CONFIG_DIR": home / "w2"}  # fmt: skip
    given = {**SECRETS, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, "-m", "unisono", *words, f"run.dir={ground / 'runs'}"]
    return jobs.finished(command, ground / "code", 240, **{n: str(p) for n, p in places.items()}, **given)


def leaks(ground: Path) -> list[str]:
    """Files, besides those that had it before, that hold a canary in their content or in their name."""
    own = {ground / "code" / "leaky.py", ground / "code" / ".git" / "config"}
    assert all(CANARY in path.read_text() for path in own)
    found = []
    for path in ground.rglob("*"):
        if path.is_file() and path not in own and "__pycache__" not in path.parts:
            content = path.read_bytes()
            content += gzip.decompress(content) if path.suffix == ".gz" else b""
            if CANARY.encode() in content or CANARY in path.name:
                found.append(str(path.relative_to(ground)))
    return found


def test_no_file_of_a_run_holds_a_secret(ground: Path) -> None:
    trackers = [name for name in ("tensorboard", "wandb", "trackio") if find_spec(name)]
    words = ("leaky.py:Leaky", *jobs.QUIET, "train.steps=5", "layout.world_size=2", "layout.device=cpu")
    told = (f"observe.trackers=[{','.join(trackers)}]", "observe.profile=[2,3]", "run.name=a", "checkpoint.every=2")
    done = unisono(ground, "train", *words, *told)
    assert done.returncode == 0, done.stderr
    run = ground / "runs" / "a"
    log = (run / "logs" / "rank-00001.log").read_text()
    assert "reading https://[hidden]@example.org with [hidden]" in log, "it was logged, without what is secret"
    assert (run / "fingerprint.json").read_text().count("[hidden]") == 2
    assert list(run.glob("tensorboard/*")) and list(run.glob("profile/*.gz"))
    assert bool(list(run.glob("wandb/*/*.wandb"))) == ("wandb" in trackers)
    assert (ground / "home" / "trackio" / "unisono.db").is_file() == ("trackio" in trackers)
    assert leaks(ground) == []
    assert CANARY not in done.stdout + done.stderr

    failed = unisono(ground, "train", *words, *told[:2], "run.name=b", FAIL="1")
    assert failed.returncode == 1
    logs = "".join(path.read_text() for path in (ground / "runs" / "b" / "logs").glob("*.log"))
    assert "403 for https://[hidden]@example.org" in logs
    assert leaks(ground) == []

    proof = ("steps=2", "global_batch=4", "layouts=[ddp:2]", "vary=[]", "run.name=c")
    proved = unisono(ground, "prove", *words[:1], *jobs.QUIET[:1], "train.steps=5", *proof)
    certificate = ground / "runs" / "c" / "certificate.json"
    assert certificate.is_file(), proved.stderr
    assert "[hidden]" in certificate.read_text()
    assert leaks(ground) == []


@pytest.mark.parametrize(
    ("override", "why"),
    [(f"task.marks=https://me:{CANARY}@example.org", "it must not hold secrets"),
     (f"run.name=x-{SECRETS['HF_TOKEN']}", "it must not hold secrets"),
     (f"task.password={CANARY}", "it must not hold secrets"),
     (f"checkpoint.upload.options={{token: {CANARY}}}", "is not an option of a store"),
     (f"task.x={CANARY}=b(c", "'task.x=…' cannot be read"), (CANARY, "one of the words is not an override")],
)  # fmt: skip
def test_a_configuration_with_a_secret_leaves_nothing_behind(ground: Path, override: str, why: str) -> None:
    done = unisono(ground, "train", "leaky.py:Leaky", *jobs.QUIET, "train.steps=5", override)
    assert done.returncode == 2
    assert why in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert not (ground / "runs").exists()
    assert leaks(ground) == []
