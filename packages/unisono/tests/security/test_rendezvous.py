"""Where nodes meet, strangers may say what they like: nobody is ended or believed, and no message is changed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.launch.node_threads import Node, connected, ends
from packages.unisono.tests.ports import free_port
from unisono.launch.nodes import run_token, tcp_rendezvous
from unisono.launch.nodes.tcp_rendezvous import TOKEN, NodeCommunicator
from unisono.runtime.communication.authenticated_line import AuthenticatedLine, GreetingError
from unisono.runtime.errors import ConfigError, DeadlineError, RunError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(tcp_rendezvous, "_GREETING_TIMEOUT", 1.0)
    return tmp_path / "runs"


NONCE = "0" * 32
WHO = {"node": 1, "nodes": 2, "host": "x", "pid": 1}
STRANGE = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 4000 + b"\n",
    b'{"a":' * 700 + b"\n",
    b'{"nonce": Infinity}\n',
    b'{"nonce": "\\ud800", "proof": "\\udfff", "who": {"host": "\\ud83d"}}\n',
    b'{"nonce": ' + b"1" * 4050 + b"}\n",
    b'{"nonce": 1e999, "proof": [], "who": {}}\n',
    b"null\n",
    b"\xff\xfe\x00\n",
    b"x" * 1_000_000,
    b'{"unisono": 4, "token": "none", "nonce": "' + NONCE.encode() + b'"}\n',
    json.dumps({"nonce": NONCE, "proof": "0" * 64, "who": WHO}).encode() + b"\n",
    json.dumps({"nonce": NONCE, "proof": "0" * 64, "who": {**WHO, "node": 2**70, "host": "\x1b[2J\n" * 99}}).encode()
    + b"\n",
    json.dumps({"nonce": NONCE, "proof": "0" * 64, "who": [1]}).encode() + b"\n",
]


def test_no_word_of_a_stranger_ends_node_0(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    first = Node(0, port, folder)
    for word in STRANGE:
        with connected(port) as link:
            link.sendall(word)
    assert ends(first, Node(1, port, folder)) == [[0, 1]] * 2
    told = capfd.readouterr().err
    assert "\x1b" not in told and "Traceback" not in told


def test_strangers_who_say_nothing_or_very_slowly_keep_nobody_waiting(folder: Path) -> None:
    port = free_port()
    first = Node(0, port, folder)
    silent = [connected(port) for _ in range(150)]
    over = threading.Event()

    def drip() -> None:
        with connected(port) as link:
            while not over.wait(0.05):
                try:
                    link.sendall(b"x")
                except OSError:
                    return

    slow = [threading.Thread(target=drip, daemon=True) for _ in range(5)]
    for thread in slow:
        thread.start()
    began = time.monotonic()
    assert ends(first, Node(1, port, folder)) == [[0, 1]] * 2
    assert time.monotonic() - began < 60, "150 times a second, and those who drip for ever"
    over.set()
    for link in silent:
        link.close()


@contextmanager
def false_node_0(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Somebody who listens where node 0 would."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        listener.settimeout(0.1)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    link = listener.accept()[0]
                except OSError:
                    continue
                with link:
                    try:
                        answer(link)
                        link.settimeout(0.5)
                        while link.recv(1 << 16):
                            pass
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        over.set()
        thread.join()


def _says(*messages: Any) -> Callable[[socket.socket], None]:
    def answer(link: socket.socket) -> None:
        for message in messages:
            link.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    return answer


HELLO = {"unisono": 4, "token": "environment", "nonce": NONCE}
OLD = [{"nonce": NONCE}, {"welcome": "node 0 (x, process 1)"}, {"values": [0, 1]}]


@pytest.mark.parametrize(
    "words",
    [OLD, [HELLO], [HELLO, {"proof": "0" * 64}, {"welcome": "x"}, {"values": [0, 1]}],
    [HELLO, {"refused": "all is lost\x1b[2J"}],
     [b"[" * 4000 + b"\n"], [{**HELLO, "nonce": "\ud800"}], [{**HELLO, "token": 3}], [b"x" * 100_000]],
)  # fmt: skip
def test_nobody_takes_the_place_of_node_0(folder: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "ours")
    with false_node_0(_says(*words)) as port:
        (end,) = ends(Node(1, port, folder, start_timeout=0.2))
    assert isinstance(end, DeadlineError | ConfigError), end
    assert "all is lost" not in str(end) and "\x1b" not in str(end)


@pytest.mark.parametrize("which", ["none", "shared:0123456789abcdef", "shared:", ""])
def test_nobody_takes_its_place_either_where_the_user_has_set_no_token(folder: Path, which: str) -> None:
    with false_node_0(_says({**HELLO, "token": which}, {"proof": "0" * 64})) as port:
        run_token.write_secret(run_token.secret_path(folder, f"127.0.0.1:{port}"), {"name": "other", "token": "x"})
        (end,) = ends(Node(1, port, folder, start_timeout=0.2))
    assert isinstance(end, DeadlineError | ConfigError), end


def test_a_token_that_nobody_has_set_is_made_for_this_user_alone_and_goes_again(folder: Path) -> None:
    port = free_port()
    first = Node(0, port, folder)
    secret = run_token.secret_path(folder.absolute(), f"127.0.0.1:{port}")
    while run_token.read_secret(secret) is None:
        time.sleep(0.02)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(str((run_token.read_secret(secret) or {})["token"])) == 64
    assert ends(first, Node(1, port, folder)) == [[0, 1]] * 2
    assert not list(folder.iterdir())


def test_a_token_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was no UTF-8 was a traceback on all nodes."""
    monkeypatch.setenv(TOKEN, os.fsdecode(b"\xff\xfe"))
    with run_token.provide_token(tmp_path / "secret", "here") as (token, which):
        assert token == run_token.find_token(which, tmp_path / "secret", "there") == b"\xff\xfe"


def test_a_node_that_does_not_see_the_folder_says_so(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    first = Node(0, port, folder)
    connected(port).close()
    (end,) = ends(Node(1, port, tmp_path / "another", start_timeout=0.2))
    assert isinstance(end, DeadlineError) and "run.dir must be on a file system that all nodes share" in str(end)
    assert ends(first, Node(1, port, folder)) == [[0, 1]] * 2


def test_a_token_of_one_node_alone_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first = Node(0, port, folder)
    shared = run_token.secret_path(folder.absolute(), f"127.0.0.1:{port}")
    while not shared.exists():
        time.sleep(0.02)
    monkeypatch.setenv(TOKEN, "mine")
    (end,) = ends(Node(1, port, folder))
    assert isinstance(end, ConfigError) and "UNISONO_TOKEN is set on this node, but is not set on node 0" in str(end)
    monkeypatch.delenv(TOKEN)
    assert ends(first, Node(1, port, folder)) == [[0, 1]] * 2


def test_where_no_token_can_be_left_a_warning_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    folder, port = tmp_path / "file" / "runs", free_port()
    assert ends(Node(0, port, folder), Node(1, port, folder)) == [[0, 1]] * 2
    told = capfd.readouterr().err
    assert "WARNING" in told and "anybody who can reach 127.0.0.1" in told and "openssl rand -hex 32" in told


@pytest.mark.parametrize("open_to", [0o644, 0o660])
def test_a_secret_that_others_can_read_is_nobody_s(tmp_path: Path, open_to: int) -> None:
    path = run_token.secret_path(tmp_path, "x")
    run_token.write_secret(path, {"token": "a"})
    assert run_token.read_secret(path) == {"token": "a"}
    path.chmod(open_to)
    assert run_token.read_secret(path) is None
    path.unlink()
    (tmp_path / "mine").write_text('{"token": "b"}')
    (tmp_path / "mine").chmod(0o600)
    path.symlink_to("mine")
    assert run_token.read_secret(path) is None
    run_token.write_secret(path, {"token": "c"})  # in place of the link, not through it
    assert (tmp_path / "mine").read_text() == '{"token": "b"}'


def test_a_secret_is_not_left_where_another_user_s_file_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_token.secret_path(tmp_path, "x")
    path.write_text("{}")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as in a sticky folder
    with pytest.raises(RunError, match=r"cannot create .*\.secret"):
        run_token.write_secret(path, {"token": "a"})
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert run_token.read_secret(path) is None


# numbers that a node says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 2, True, "1", 1.0, None, [1], 2**70])
def test_a_number_that_no_node_can_have_is_refused_with_a_sentence(
    folder: Path, number: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "ours")
    port = free_port()
    first = Node(0, port, folder)
    link = connected(port)
    line = AuthenticatedLine(link, "node 0")
    deadline = time.monotonic() + 60
    _, nonce = line.offer(deadline)
    line.introduce({**WHO, "node": number}, b"ours", nonce, deadline)
    (end,) = ends(first)
    assert isinstance(end, ConfigError) and "launch.node_rank is" in str(end)
    line.close()


# messages on their way ------------------------------------------------------------------------------------------------


@contextmanager
def between(port: int, change: Callable[[int, bytes], list[bytes]]) -> Iterator[int]:
    """Somebody on the way to node 0, who changes what node 1 hears: lines by number, from 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(5)

        def forward() -> None:
            mine = listener.accept()[0]
            theirs = connected(port)

            def up() -> None:
                try:
                    while part := mine.recv(1 << 16):
                        theirs.sendall(part)
                except OSError:
                    pass

            threading.Thread(target=up, daemon=True).start()
            with theirs.makefile("rb") as lines:
                try:
                    for number, line in enumerate(lines):
                        for changed in change(number, line):
                            mine.sendall(changed)
                except OSError:
                    pass

        threading.Thread(target=forward, daemon=True).start()
        yield listener.getsockname()[1]


CHANGES: dict[str, Callable[[int, bytes], list[bytes]]] = {
    "a value": lambda n, line: [line.replace(b"[0, 1]", b"[9, 1]")],
    "repeated": lambda n, line: [line] * (2 if n == 2 else 1),
    "left out": lambda n, line: [] if n == 3 else [line],
    "invented": lambda n, line: [line, b'{"values": [9, 1]}\n'] if n == 2 else [line],
    "its proof": lambda n, line: [line[1:]] if n == 3 else [line],
}


def test_a_message_that_was_changed_on_its_way_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "ours")

    def act(met: NodeCommunicator) -> Any:
        return [met.gather(met.rank, "ranks"), met.gather(met.rank, "again")]

    pairs = {}
    with ExitStack() as stack:
        for how, change in CHANGES.items():
            port = free_port()
            first = Node(0, port, folder, act, timeout=3)
            pairs[how] = first, Node(1, stack.enter_context(between(port, change)), folder, act, timeout=3)
        found = {how: ends(*pair)[1] for how, pair in pairs.items()}
    assert {how: type(end) for how, end in found.items()} == dict.fromkeys(CHANGES, DeadlineError), found


def test_unchanged_messages_pass_the_same_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "ours")
    port = free_port()
    first = Node(0, port, folder)
    with between(port, lambda n, line: [line]) as way:
        assert ends(Node(1, way, folder), first) == [[0, 1]] * 2


def test_a_greeting_of_any_kind_is_one_error(folder: Path) -> None:
    for word in STRANGE:
        mine, theirs = socket.socketpair()
        theirs.sendall(word[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(GreetingError):
            AuthenticatedLine(mine, "x").admit(b"token", "environment", time.monotonic() + 0.2)
