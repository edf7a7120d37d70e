"""Which devices JAX is started with: the names are those that its option `jax_platforms` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from packages.unisono.tests.jax_runs import configuration, layout
from unisono.config.schema.layout import Layout
from unisono.engines.jax import devices
from unisono.engines.jax.parallel import runtime
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError

Host = Callable[[str, str, int], None]
KINDS = [("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")]  # of a backend, and of `Device.platform`


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    """Make this host one where JAX finds so many devices; the query runs against a JAX of that kind."""

    def pretend(backend: str, platform: str, count: int) -> None:
        (tmp_path / "jax/extend").mkdir(parents=True, exist_ok=True)
        (tmp_path / "jax/__init__.py").write_text(
            f"class Client: pass\nclient = Client()\n"
            f"class Device: platform = {platform!r}; device_kind = 'a {backend}'; client = client\n"
            f"def local_devices(): return [Device()] * {count}\n"
        )
        (tmp_path / "jax/extend/__init__.py").write_text("")
        (tmp_path / "jax/extend/backend.py").write_text(
            f"import jax\ndef backends(): return {{'cpu': object(), {backend!r}: jax.client}}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setattr(devices, "_are_installed", lambda packages: True)
        devices._query_devices.cache_clear()
        devices.accelerators.cache_clear()

    yield pretend
    monkeypatch.undo()
    devices._query_devices.cache_clear()
    devices.accelerators.cache_clear()


@pytest.mark.parametrize(("backend", "platform"), KINDS)
def test_a_device_has_the_name_by_which_jax_starts_it(host: Host, backend: str, platform: str) -> None:
    host(backend, platform, 2)
    assert devices.accelerators() == (backend, 2)
    assert devices.product(backend) == f"a {backend}"
    for asked in ("auto", backend, platform):
        assert devices.resolve(Layout(device=asked, engine="jax"), 1, "bf16") == backend


def test_another_kind_than_the_hosts_is_refused(host: Host) -> None:
    host("cuda", "gpu", 1)
    with pytest.raises(ConfigError, match=r"layout\.device=rocm: JAX finds 1 × cuda on this host; use auto or cpu"):
        devices.resolve(Layout(device="rocm", engine="jax"), 1, "fp32")


@pytest.mark.parametrize("kind", ["cuda", "rocm", "tpu"])
def test_jax_is_started_with_this_kind_and_the_cpu_alone(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(runtime, "_set_option", options.__setitem__)
    config = configuration(layout=layout(device=kind))
    runtime.start(config, ProcessInfo(0, 1), SingleProcess())
    assert options["jax_platforms"] == f"{kind},cpu"


def test_where_jax_cannot_start_its_message_stands_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("Unable to initialize backend 'cuda': no such device")

    monkeypatch.setattr(runtime, "_set_option", lambda name, value: None)
    monkeypatch.setattr(jax, "local_device_count", fail)
    config = configuration(layout=layout(device="cuda"))
    with pytest.raises(ConfigError, match=r"layout.device=cuda: JAX could not start on it: .* no such device"):
        runtime.start(config, ProcessInfo(0, 1), SingleProcess())
