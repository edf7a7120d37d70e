"""Attacks by a hostile file or by somebody on the network."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from unisono_faults import job
from unisono_faults.matrix import REFUSED, UNREACHED, Outcome, Sandbox, scenario


class _Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.touched}",)


def _evaluate(sandbox: Sandbox) -> job.JobResult:
    return sandbox.run_verb("evaluate", f"runs/{job.RUN}", "--task", f"{job.TASK}:Small")


@scenario("S1", "a checkpoint with each file replaced by a pickle payload")
def _payload(sandbox: Sandbox) -> Outcome:
    outcome, touched = Outcome(), sandbox.folder / "touched"
    pickle.loads(pickle.dumps(_Payload(touched)))
    assert touched.exists(), "the payload does nothing"
    touched.unlink()
    newest = sandbox.train_to_end()
    for file in sorted(newest.iterdir()):
        content = file.read_bytes()
        file.write_bytes(pickle.dumps(_Payload(touched)))
        outcome.expect(_evaluate(sandbox), REFUSED, file.name, name=file.name)
        outcome.check(not touched.exists(), f"{file.name} was unpickled")
        file.write_bytes(content)
    return outcome


@scenario("S2", "a manifest with names outside its folder")
def _escape(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    newest = sandbox.train_to_end()
    secret = sandbox.folder / "secret.safetensors"
    shard = next(newest.glob("*.safetensors"))
    shutil.copy(shard, secret)
    original = (newest / "manifest.json").read_text()
    for hostile in (f"../../../../{secret.name}", str(secret)):
        text = original.replace(json.dumps(shard.name), json.dumps(hostile))
        job.rewrite_manifest(newest, lambda _, text=text: json.loads(text))  # type: ignore[misc]
        outcome.expect(_evaluate(sandbox), REFUSED, name=hostile)
    return outcome


@scenario("S3", "a checkpoint with a symlink out of its folder")
def _link(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    newest = sandbox.train_to_end()
    shard = next(newest.glob("*.safetensors"))
    elsewhere = sandbox.folder / "elsewhere.safetensors"
    shutil.move(shard, elsewhere)
    shard.symlink_to(elsewhere)
    outcome.expect(_evaluate(sandbox), REFUSED, shard.name)
    return outcome


@scenario("S4", "YAML with object tags, an alias bomb, and `_target_`")
def _yaml(sandbox: Sandbox) -> Outcome:
    outcome, touched = Outcome(), sandbox.folder / "touched"
    configs = {
        "tag": f"!!python/object/apply:os.system ['touch {touched}']",
        "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(12)
        ),
        "target": f"recipe: faulty.py:Small\nrun:\n  _target_: os.system\n  command: touch {touched}\n",
    }  # fmt: skip
    for name, text in configs.items():
        folder = sandbox.folder / name
        folder.mkdir()
        (folder / "mine.yaml").write_text(text)
        done = sandbox.run_verb("check", "mine", f"--config-dir={folder}")
        outcome.expect(done, REFUSED, name=name)
        outcome.check(not touched.exists(), f"{name} ran a command")
        outcome.check("Traceback" not in done.output, f"{name}: {done.output[-800:]}")
    return outcome


@scenario("S5", "a secret in the configuration")
def _secret(sandbox: Sandbox) -> Outcome:
    canary = "hf_" + "Q7x" * 11
    outcome = Outcome()
    outcome.expect(sandbox.run(f"observe.project={canary}"), REFUSED)
    _check_no_leak(outcome, sandbox, canary)
    return outcome


@scenario("S5b", "a configuration that reads a password from the environment")
def _secret_of_the_environment(sandbox: Sandbox) -> Outcome:
    canary = "Q7x" * 11
    outcome, done = Outcome(), sandbox.run("observe.project='${oc.env:PGPASSWORD}'", variables={"PGPASSWORD": canary})
    outcome.expect(done, REFUSED)
    outcome.check("Traceback" not in done.output, done.output[-800:])
    _check_no_leak(outcome, sandbox, canary)
    return outcome


def _check_no_leak(outcome: Outcome, sandbox: Sandbox, secret: str) -> None:
    """Check that no file of a scenario, the output of its jobs included, contains a secret."""
    leaks = [p for p in sandbox.folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    outcome.check(not leaks, f"{leaks} contain it")


@scenario("S6", "a stranger sends garbage and a malicious pickle to every open port")
def _stranger(sandbox: Sandbox) -> Outcome:
    words = ("task.sleep=0.05", "train.steps=60")
    before, outcome, touched = sandbox.reference_digests(*words), Outcome(), sandbox.folder / "touched"
    hostile = [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n" * 9, os.urandom(4096), pickle.dumps(_Payload(touched))]
    with sandbox.job(*words) as run:
        run.wait_for_step(3)
        ports = [place for pid in run.pids() for place in _listening(pid)]
        outcome.check(len(ports) > 1, f"it listens on no port: {ports}")
        outside = [place for place in ports if not ipaddress.ip_address(place[0]).is_loopback]
        outcome.check(not outside, f"other hosts can reach {outside}")
        for place, data in itertools.product(ports, hostile):
            with suppress(OSError), socket.create_connection(place, 5.0) as link:
                link.sendall(data)
        outcome.check(run.step() < 60, "the run had ended before")
        done = run.finish()
    outcome.check(not touched.exists(), "something was unpickled")
    outcome.compare(done, before)
    outcome.message = f"{len(ports)} ports, all local to this host; the run continues"
    return outcome


@scenario("S6b", "strangers at the rendezvous port: garbage, a wrong token, no token")
def _uninvited_nodes(sandbox: Sandbox) -> Outcome:
    before, outcome, port = sandbox.reference_digests(), Outcome(), job.free_port()
    words, ours = ("launch.start_timeout=90",), {"UNISONO_TOKEN": "ours"}
    garbage = (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b'{"node": 1, "nodes": 2, "proof": ""}\n')
    with sandbox.node(0, port, *words, variables=ours) as first:
        _send_to_node_0(first, port, garbage)
        for token in ("theirs", ""):
            stranger = sandbox.for_scenario("stranger")
            with stranger.node(1, port, *words, variables={"UNISONO_TOKEN": token}) as other:
                outcome.expect(other.finish(60), REFUSED, "UNISONO_TOKEN", name=f"the node with the token '{token}'")
        with sandbox.node(1, port, *words, variables=ours) as second:
            for done in (first.finish(), second.finish()):
                outcome.compare(done, before)
    return outcome


@scenario("S8", "rendezvous: input that breaks parsers, and an impostor of node 0")
def _rendezvous(sandbox: Sandbox) -> Outcome:
    words = ("launch.start_timeout=60",)
    before, outcome, port = sandbox.reference_digests(), Outcome(), job.free_port()
    nonce = b'"nonce": "' + b"0" * 32 + b'"'
    hostile = [
        b"[" * 4000 + b"\n", b'{"a":' * 800 + b"\n", b'{"nonce": Infinity}\n', b'{"nonce": ' + b"9" * 4000 + b"}\n",
        b"{" + nonce + b', "proof": "\\ud800", "who": {"host": "\\udfff"}}\n', b"\xff\xfe\n", b"x" * 1_000_000,
        b"{" + nonce + b', "proof": "' + b"0" * 64 + b'", "who": {"node": 1, "nodes": 2, "host": "\\u001b[2J"}}\n',
    ]  # fmt: skip

    with sandbox.node(0, port, *words) as first:
        _send_to_node_0(first, port, hostile)
        with sandbox.node(1, port, *words) as second:
            for done in (first.finish(), second.finish()):
                outcome.compare(done, before)
                outcome.check("\x1b" not in done.output, "escape sequences from a stranger reach the terminal")
    answers = (
        b'{"unisono": 2, "token": "none", ' + nonce + b'}\n{"nonce": "1"}\n{"welcome": "x"}\n{"values": [[], []]}\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as false:
        threading.Thread(target=_answer, args=(false, answers), daemon=True).start()
        with sandbox.for_scenario("false").node(1, false.getsockname()[1], *words) as believer:
            done = believer.finish()
    outcome.check(done.code in (REFUSED, UNREACHED), f"a false node 0 was believed: {done.code}: {done.output[-800:]}")
    outcome.check(not (believer.run / "checkpoints").exists(), "it trained")
    outcome.message = done.message
    return outcome


def _send_to_node_0(node: job.Job, port: int, messages: Iterable[bytes]) -> None:
    """Connect to node 0 once for each message, as anybody may."""
    job.wait_for(lambda: "meets the others" in node.output.read_text(), 60.0, "node 0 to listen")
    for data in messages:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 20.0) as link:
            link.sendall(data)


@scenario("S8b", "another user of the host floods the rendezvous store with 240 MB")
def _store(sandbox: Sandbox) -> Outcome:
    words = ("task.sleep=0.1", "train.steps=100")
    before, outcome = sandbox.reference_digests(*words), Outcome()
    with sandbox.job(*words) as run:
        run.wait_for_step(3)
        ranks = run.wait_for_ranks(2)
        memory = {pid: psutil.Process(pid).memory_info().rss for pid in ranks}
        ports = [place for pid in run.pids() for place in _listening(pid)]
        outcome.check(bool(ports), "it listens on no port, so the test is vacuous")
        began = run.step()
        for place in ports:
            threading.Thread(target=_set_a_key, args=(place,), daemon=True).start()
        peak = dict(memory)
        while run.process.poll() is None:
            for pid in memory:
                with suppress(psutil.Error):
                    peak[pid] = max(peak[pid], psutil.Process(pid).memory_info().rss)
            time.sleep(0.05)
        done = run.finish()
        growth = max((peak[pid] - memory[pid]) / 1e6 for pid in memory)
        outcome.check(run.step() - began > 20, "the run had ended before")
    outcome.check(growth < 50, f"a process grew by {growth:.0f} MB")
    outcome.compare(done, before)
    outcome.message = "processes of one host connect through a file that only this user can read; no port accepts keys"
    return outcome


def _set_a_key(place: tuple[str, int]) -> None:
    """Ask torch's TCPStore to store 240 MB; it accepts up to 8 MB per key."""
    value = bytes(1 << 20)
    with suppress(OSError), socket.create_connection(place, 5.0) as link:
        link.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little"))  # the greeting of its protocol
        for number in range(240):
            key = f"k{number}".encode()
            link.sendall(b"\x01" + len(key).to_bytes(8, "little") + key + len(value).to_bytes(8, "little") + value)


def _answer(listener: socket.socket, words: bytes) -> None:
    with suppress(OSError):
        while True:
            link = listener.accept()[0]
            with suppress(OSError):
                link.sendall(words)


def _listening(pid: int) -> list[tuple[str, int]]:
    with suppress(psutil.Error):
        return [
            (*one.laddr,) for one in psutil.Process(pid).net_connections("inet") if one.status == psutil.CONN_LISTEN
        ]
    return []
