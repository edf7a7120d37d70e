"""Addresses are written as they are read."""

from __future__ import annotations

import pytest

from unisono.launch.nodes import network
from unisono.runtime.communicator import format_address


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("fd00::1", "[fd00::1]:29400")])
def test_an_address_is_written_as_it_is_read(host: str, text: str):
    assert format_address(host, 29400) == text
    assert network.parse_rendezvous(text) == (host, 29400)
