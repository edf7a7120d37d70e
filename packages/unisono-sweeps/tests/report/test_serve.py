"""`unisono report --serve`: on this host, with a token, and as the runs are now."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.runtime.errors import ConfigError
from unisono_sweeps.report import serve

from ..written import write_run


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.ReportServer]:
    write_run(tmp_path / "s" / "a", [3.0, 2.0], optim__lr=0.1)
    monkeypatch.setattr(serve, "_KEPT", 0.0)
    with serve.ReportServer(tmp_path / "s") as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()


def visit(server: serve.ReportServer, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_the_page_follows_the_runs(server: serve.ReportServer, tmp_path: Path) -> None:
    status, page, headers = visit(server, f"/{server.token}/")
    assert status == 200
    assert "1 of 1 runs finished" in page
    assert '<meta http-equiv="refresh" content="10">' in page
    assert headers["Referrer-Policy"] == "no-referrer"
    write_run(tmp_path / "s" / "b", [3.0, 2.5], optim__lr=0.2)
    assert "2 of 2 runs finished" in visit(server, f"/{server.token}/")[1]


def test_nothing_is_shown_without_the_token_or_under_another_name(server: serve.ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", f"/{server.token[:-1]}/", f"/?token={server.token}", "/%C3%A9/", "/s/a/config.yaml"):
        status, said, _ = visit(server, path)
        assert status == 403, path
        assert "token" in said
        assert "runs finished" not in said
    assert visit(server, f"/{server.token}/", "evil.example")[0] == 403
    assert visit(server, f"/{server.token}/a/config.yaml")[0] == 404


def test_a_visitor_who_leaves_prints_nothing(server: serve.ReportServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Each one who reset the connection, as anyone on the host can, printed a traceback on the terminal."""
    for error in (ConnectionResetError(104, "Connection reset by peer"), ValueError("a\nforged line")):
        try:
            raise error
        except (OSError, ValueError):
            server.handle_error(None, None)
    assert capsys.readouterr().err == "unisono: WARNING: the page could not be made: a\\x0aforged line\n"


def test_a_port_in_use_is_named(server: serve.ReportServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--port {server.server_port}: Address already in use"):
        serve.ReportServer(tmp_path / "s", server.server_port)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [3.0, 2.0])
    command = [sys.executable, "-m", "unisono", "report", str(tmp_path / "a"), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/\S{20,}/)\n", address)
        assert found is not None, address
        assert "ssh -L" in process.stdout.readline()
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", found[2])
        assert b"finished after step 2" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
