"""A proof compares layouts, so all of its cases run on one kind of device."""

from __future__ import annotations

import pytest

from packages.unisono.tests.configs import configured
from unisono.engines.torch import devices
from unisono.proof import case_process, prove
from unisono.proof.cases import ProofSettings, build_cases


@pytest.mark.parametrize(("count", "chosen"), [(0, "cpu"), (1, "cpu"), (2, "cuda")])
def test_no_case_runs_on_another_kind_of_device_than_its_reference(
    monkeypatch: pytest.MonkeyPatch, count: int, chosen: str
) -> None:
    """On a host with one GPU, one process was on it and two were on the CPU."""
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda", count) if count else ("cpu", 0))
    config = configured("examples/spirals.py:Spirals", "layout.device=auto")
    proof = ProofSettings(layouts=["ddp:2"])
    every = build_cases(proof, config)
    before = {case_process.build_case_config(config, case, proof, None).layout.device for case in every}
    assert len(before) == (2 if count == 1 else 1)
    config, told = prove._choose_device(every, config, proof)
    assert {case_process.build_case_config(config, case, proof, None).layout.device for case in every} == {chosen}
    assert told.startswith(chosen)
    monkeypatch.setattr(devices, "product", lambda kind: f"a {kind}")
    certified = prove._describe_layouts(every, config, proof)
    assert {layout["device"] for layout in certified.values()} == {f"a {chosen}"} and len(certified) == len(every)
    assert ("fewer cuda devices than the largest layout" in told) == (count == 1)
