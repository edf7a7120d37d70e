"""Plays an environment of `verifiers` with the model in a folder, which a server of transformers answers for.

A process of its own, so that an environment's imports, messages and event loop stay out of the run. It ends with the
thread that started it, and the server with it, however either ends. Imports verifiers, which may be missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.recipe_tools import die_with_process, safe_paths

_HOST = "127.0.0.1"
_TOGETHER = 8  # episodes that are played at once
_SHOWN = 8  # answers that are kept to be read
_TOKENS = 256  # of an answer, where the environment gives no bound
GRACE = 5  # seconds in which it may end what it has started
_NO_KEY = "UNISONO_NO_KEY"  # a variable that is not set: the server asks for no key


class _Asked(TypedDict):
    model: str
    name: str
    limit: int | None
    result: str
    log: str


def main() -> None:
    """Play the environment that a JSON file describes, and write what came of it beside."""
    die_with_process(int(sys.argv[2]), signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    _ask_without_proxies()
    path = Path(sys.argv[1])
    asked = safe_paths.read_json(path.parent, path.name, _Asked)
    with _server(Path(asked["model"]), Path(asked["log"])) as url:
        found = asyncio.run(_play(asked["name"], asked["limit"], asked["model"], url))
    Path(asked["result"]).write_text(json.dumps(found), encoding="utf-8")


def _end(number: int, frame: object) -> None:
    """End the server, too; within seconds, though asyncio waits for threads that wait for an answer."""
    signal.alarm(GRACE)  # ends this process, and the kernel the server
    sys.exit(128 + number)


def _ask_without_proxies() -> None:
    """Have all clients here and below reach this host itself, whatever proxies the environment names."""
    named = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).strip()
    if named != "*":  # urllib knows it only alone
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (named, _HOST, "localhost")))


@contextmanager
def _server(model: Path, log: Path) -> Iterator[str]:
    """The address of a server that answers for a model, on a free port of this machine alone."""
    with socket.socket() as held, log.open("wb") as output:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        port = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()  # Linux lets the server have the port of a socket that does not listen, and nobody else
        command = [
            sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--host", _HOST,
            "--port", str(port),
        ]  # fmt: skip
        parent = os.getpid()
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, preexec_fn=lambda: die_with_process(parent),
        )  # fmt: skip
        try:
            while True:
                if server.poll() is not None:
                    sys.exit(f"the server ended before it was up: {last_line(log)}")
                if _is_up(port):
                    break
                time.sleep(0.1)
            yield f"http://{_HOST}:{port}/v1"
        finally:
            server.kill()
            server.wait()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def last_line(log: Path) -> str:
    """The last words of a program."""
    lines = safe_paths.read_bytes(log.parent, log.name).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


async def _play(name: str, limit: int | None, model: str, url: str) -> dict[str, Any]:
    """One episode of each task: values by name, and some answers."""
    import verifiers.v1 as vf

    env = vf.load_environment(_settings(vf, name))
    tasks = env.taskset if limit is None else env.taskset.take(limit)
    if not tasks.bounded:
        sys.exit("has no end of tasks; set eval.environment_limit")
    client = vf.EvalClientConfig(base_url=url, api_key_var=_NO_KEY)
    context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig(temperature=0, max_tokens=_TOKENS))
    gate = asyncio.Semaphore(_TOGETHER)
    async with env.serving():
        slots = [slot for task in tasks for slot in env.slots(task, 1)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, gate) for slot in slots))
    if not episodes:
        sys.exit("has no tasks")
    failed = [episode for episode in episodes if not episode.ok]
    if len(failed) == len(episodes):
        sys.exit(f"failed in all {len(failed)} episodes: {_error(failed[0])}")
    return {**_values(episodes, len(failed)), "samples": [_sample(one) for one in episodes[:_SHOWN] if one.traces]}


def _settings(vf: Any, name: str) -> Any:
    """The environment's own settings; but roles that name no program talk to the model without tools, here.

    The default of verifiers gives the model a shell in a sandbox of its maker.
    """
    config = vf.resolve_env_config({"taskset": {"id": name}})
    own = vf.default_harness_id(name)
    program = own if own != "bash" else "null"
    if vf.load_harness(vf.harness_config_type(program).model_validate({"id": program})).EXECUTES_CODE:
        return config
    roles = {
        role: {"harness": {"id": program}, "runtime": {"type": "subprocess"}}
        for role, agent in config
        if isinstance(agent, vf.AgentConfig) and agent.harness is None and "runtime" not in agent.model_fields_set
    }
    return vf.resolve_env_config({"taskset": {"id": name}, **roles})


def _values(episodes: list[Any], failed: int) -> dict[str, Any]:
    """Means over all traces that have a value."""
    traces = [trace for episode in episodes for trace in episode.traces if trace.ok]
    found: dict[str, list[float]] = {}
    for trace in traces:
        found.setdefault("reward", []).append(float(trace.reward))
        for name, reward in trace.rewards.items():
            if reward is not None:
                found.setdefault(f"rewards/{name}", []).append(float(reward.value))
        for name, value in trace.metrics.items():
            if value is not None:
                found.setdefault(f"metrics/{name}", []).append(float(value))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {"values": {**means, "episodes": float(len(episodes)), "failed": float(failed)}}


def _sample(episode: Any) -> dict[str, Any]:
    trace = episode.traces[-1]
    return {"task": episode.task.data.prompt_text, "answer": trace.last_reply, "reward": float(trace.reward)}


def _error(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason was given"


if __name__ == "__main__":
    main()
