"""Arrays of any framework, also while torch is only being imported."""

from __future__ import annotations

import socket
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest

from unisono.checkpoint.core import provenance
from unisono.data.loading import ipc
from unisono.engines import host_arrays


@dataclass(frozen=True)
class Rows:
    """What pickling asks about."""

    count: int


def test_nothing_is_torchs_while_a_thread_is_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a JAX run whose tracker imports it: a save at that moment ended the run with an AttributeError."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # the module as it is at the beginning
    array = np.arange(3.0)
    assert host_arrays.to_numpy(array) is array
    assert not host_arrays.can_copy_async(array)
    assert provenance.versions("torch")["numpy"]
    one, other = socket.socketpair()
    with one, other:
        ipc.send(one, {"rows": Rows(3)})
        assert ipc.receive(other) == {"rows": Rows(3)}
