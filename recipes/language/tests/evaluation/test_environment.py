"""Environments of verifiers, played with the model in training on a server that the run starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import unisono
import unisono.launch.trained.run
from recipes.language.tests.chats import CHATML, assistant, chat_model, user, write_rows
from recipes.language.tests.corpora import TEXTS, trained, write_jsonl
from unisono.observe.events import read_events
from unisono_language.evaluation import environment_process
from unisono_language.evaluation.environment import Environment

ANSWERS = {"who sleeps?": "the lazy dog", "who jumps?": "the quick brown fox"}
TASKS = '''
"""Questions and their answers, asked over HTTP without a program beside."""

import asyncio
import json
import time
import urllib.request

import verifiers.v1 as vf

__all__ = ["Ask", "Questions"]
ROWS = {"who sleeps?": "the lazy dog", "who jumps?": "the quick brown fox", "and then?": "nobody knows"}


class QuestionData(vf.TaskData):
    answer: str


class QuestionTask(vf.Task[QuestionData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Questions(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    def load(self):
        return [QuestionTask(QuestionData(prompt=q, answer=a), self.config.task) for q, a in ROWS.items()]


class Ask(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        head = {"content-type": "application/json", "authorization": f"Bearer {secret}"}
        request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), head)
        await asyncio.to_thread(lambda: urllib.request.urlopen(request).read())
        SLOW
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("base"), CHATML)


def words(base: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run that learns some answers by heart, in a folder with two environments."""
    (folder / "own_questions.py").write_text(TASKS.replace("SLOW", "pass"))
    (folder / "endless_questions.py").write_text(TASKS.replace("SLOW", "await asyncio.sleep(3600)"))
    talk = [{"messages": [user(question), assistant(answer)]} for question, answer in ANSWERS.items()]
    data = write_rows(folder / "talk" / "a.jsonl", talk)
    return {
        "model": "pretrained", "model.path": str(base), "data": "chat", "data.path": str(data),
        "data.cache": str(folder / "cache"), "data.held_out": 0.0, "task.sequence": 128, "layout.world_size": 1,
        "layout.threads": 1, "train.steps": 60, "train.global_batch": 2, "optim.lr": 1e-2, "eval.every": None,
        "checkpoint.every": None, "observe.trackers": [], "observe.progress": False, "run.name": "run",
        "run.dir": str(folder / "runs"), "eval.environment": "own-questions", **more,
    }  # fmt: skip


def below(folder: Path) -> list[psutil.Process]:
    """Processes that name something in a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and ("environment_process" in line or "serve" in line):
            found.append(process)
    return found


def wait_for(condition: Any, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_rewards_of_an_environment_are_values_of_an_evaluation(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The claim: the model in training answers as it has learned, on any layout; nothing of it is left."""
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    monkeypatch.chdir(tmp_path)
    layout = {"layout.world_size": 2, "layout.strategy": "fsdp"} if strategy == "fsdp" else {}
    best = {
        "checkpoint.keep_best": {"metric": "environment/own_questions/reward", "mode": "max"}, "eval.every": 60,
        "checkpoint.every": 60,
    }  # fmt: skip
    run = unisono.train("language", words(base, tmp_path, **layout, **best)).folder
    [event] = [event for event in read_events(Path(run) / "events.jsonl") if event.get("eval")]
    found = {key.rpartition("own_questions/")[2]: value for key, value in event.items() if "own_questions/" in key}
    assert found.pop("metrics/length") > 10
    assert found == pytest.approx({"reward": 2 / 3, "rewards/exact": 2 / 3, "episodes": 3, "failed": 0})
    [shown] = [one for one in read_events(Path(run) / "events.jsonl") if one.get("sample") == "environment"]
    rows = [dict(zip(shown["columns"], row, strict=True)) for row in shown["rows"]]
    assert {row["task"]: row["answer"] for row in rows}.items() >= ANSWERS.items()
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0]
    assert not list(Path(run).glob(".evaluated*"))
    assert not below(tmp_path)
    if strategy == "single":
        (Path(run) / ".evaluated").mkdir()  # as if the run trained on, and its server had this folder
        again = unisono.launch.trained.run.evaluate(
            Path(run), ["eval.environment=own_questions", "eval.environment_limit=2"]
        )
        assert again["environment/own_questions/reward"] == 1.0
        assert [path.name for path in Path(run).glob(".evaluated*")] == [".evaluated"]
        with pytest.raises(unisono.UnisonoError, match="has no held-out rows"):
            unisono.launch.trained.run.evaluate(Path(run))


@pytest.mark.slow
def test_the_server_ends_at_the_deadline(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    monkeypatch.chdir(tmp_path)
    more = {"eval.environment": "endless_questions", "launch.deadlines.evaluate": 60, "train.steps": 1}
    with pytest.raises(unisono.UnisonoError, match=r"eval\.environment has not ended after 60 s; if that"):
        unisono.train("language", words(base, tmp_path, **more))
    assert not below(tmp_path)
    assert not list((tmp_path / "runs" / "run").glob(".evaluated*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_a_run_that_is_killed(base: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The claim: no process is left, whether the run is asked to end or is gone at once; and the former has saved."""
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    more = {"eval.environment": "endless_questions", "train.steps": 1, "launch.preempt_deadline": 5}
    values = words(base, tmp_path, **more)
    code = f"import unisono\nunisono.train('language', {values!r})\n"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True) as run:
        try:
            wait_for(lambda: len(below(tmp_path)) == 2)
            os.kill(run.pid, number)
            run.wait(timeout=60)  # the environment would take an hour
            wait_for(lambda: not below(tmp_path), 60)
            assert (tmp_path / "runs" / "run" / "checkpoints").is_dir() == (number == signal.SIGTERM)
        finally:
            run.kill()


def test_what_is_no_environment_is_refused_before_the_start(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed")
    with pytest.raises(unisono.ConfigError, match="there is no module 'nowhere', neither installed nor in"):
        unisono.train("language", words(base, tmp_path, **{"eval.environment": "Nowhere"}))
    with pytest.raises(unisono.ConfigError, match="a server loads whole models, and this run trains adapters"):
        unisono.train("language", words(base, tmp_path, adapter="lora"))


def test_a_model_without_a_chat_template_has_no_environment(tmp_path: Path) -> None:
    """And none without the package, whose name the refusal says."""
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXTS)
    with pytest.raises(unisono.ConfigError, match="this tokenizer has no chat template"):
        trained(tmp_path, **{"eval.environment": "own_questions"})


def test_the_missing_package_is_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(unisono.ConfigError, match=r"eval\.environment needs .*pip install 'unisono\[environments\]'"):
        unisono.train("language", words(base, tmp_path))


# processes beside -----------------------------------------------------------------------------------------------------

HEALTH = """
import http.server, os, sys, threading
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
threading.Timer(20, os._exit, [1]).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_the_server_is_asked_past_proxies_on_a_port_that_nobody_else_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: neither a proxy nor the server of another run answers for it, also while it loads its libraries."""

    def start(command: list[str], **rest: Any) -> subprocess.Popen[bytes]:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(command[-1])))
        return subprocess.Popen([sys.executable, "-c", HEALTH, command[-1]], **rest)

    for name, value in {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment_process, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    environment_process._ask_without_proxies()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    with environment_process._server(tmp_path / "model", tmp_path / "log") as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        assert environment_process._is_up(port)
    assert not environment_process._is_up(port)


def test_an_environment_that_was_stopped_before_it_began_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Environment("own-questions", None, [])
    monkeypatch.setattr(subprocess, "Popen", None)
    played.stop()
    with pytest.raises(unisono.RunError, match="own-questions was given up"):
        played.measure_folder(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_process_ends_within_seconds_though_its_threads_wait() -> None:
    """The claim: a signal ends it where the rank is gone, too, which would kill it otherwise."""
    code = """
import asyncio, signal, time
from unisono_language.evaluation import environment_process
signal.signal(signal.SIGTERM, environment_process._end)
async def play():
    waits = asyncio.get_running_loop().run_in_executor(None, time.sleep, 120)
    print("up", flush=True)
    await waits
asyncio.run(play())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            process.terminate()
            assert process.wait(30) == -signal.SIGALRM
        finally:
            process.kill()
