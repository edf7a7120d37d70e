"""What the recorder takes from a script, on one process and on two, and what it leaves alone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from packages.unisono.tests import processes
from unisono.proof import Records, World, invariants
from unisono.proof.diagnoses import diagnosis
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import Trace
from unisono.proof.scripts.recording import trained_model
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError

DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))


def build_world(folder: Path, rank: int = 0, size: int = 1, perturbed: float = 0.0) -> World:
    return World(rank, size, rank, folder, 60.0, perturbed)


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def begin(folder: Path, model: nn.Module | None = None, **more: Any) -> tuple[nn.Module, Any, Records]:
    model = build_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, build_world(folder, **more).records(model, optimizer)


def read_initial(folder: Path) -> dict[str, Any]:
    """Initial parameters, which are there before there is a trace."""
    return load_file(folder / "start-initial-parameters.safetensors")


def end(records: Records, folder: Path) -> Trace:
    records.close()
    return Trace(folder)


def update(model: nn.Module, optimizer: Any, records: Records) -> torch.Tensor:
    """One step with all rows; returns its loss."""
    loss = backward(model)
    optimizer.step()
    records.step()
    return loss


def backward(model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
    loss: torch.Tensor = model(DATA[rows]).square().mean()
    loss.backward()
    return loss.detach()


def test_a_step_is_recorded_as_the_optimizer_made_it(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    first = {name: value.detach().clone().numpy() for name, value in model.named_parameters()}
    loss = backward(model)
    raw = {name: value.grad.clone().numpy() for name, value in model.named_parameters() if value.grad is not None}
    records.gradients()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    optimizer.step()
    schedule.step()
    records.step(rows=torch.tensor([[3], [1]]), loss=loss, metrics={"accuracy": torch.tensor(0.5)})
    trace = end(records, tmp_path)
    (step,) = trace.facts.steps
    assert (step.rows, step.by_rank) == ([1, 3], [[3, 1]])
    assert step.lr == [[0.5]]  # not what the schedule made of it since
    assert (step.loss, step.metrics) == (float(loss), [{"accuracy": 0.5}])
    assert step.grad_norm == pytest.approx(norm)
    clipped = trace.tensors("clipped gradients", 0)
    for name, value in model.named_parameters():
        np.testing.assert_array_equal(trace.tensors("initial parameters")[name], first[name])
        np.testing.assert_array_equal(trace.tensors("raw gradients", 0)[name], raw[name])
        np.testing.assert_allclose(clipped[name], raw[name] * 0.01 / norm, rtol=1e-4)
        np.testing.assert_array_equal(trace.tensors("parameters", 0)[name], value.detach().numpy())
        state = trace.tensors("optimizer state", 0)[f"optimizer/{name}/momentum_buffer"]
        np.testing.assert_array_equal(state, clipped[name])
    assert (trace.facts.optimizer, trace.facts.trainable) == ("SGD", list(first))


def test_a_script_that_does_not_clip_need_not_record_gradients(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    update(model, optimizer, records)
    trace = end(records, tmp_path)
    assert set(trace.tensors("raw gradients", 0)) == set(dict(model.named_parameters()))
    assert trace.tensors("clipped gradients", 0) == {}
    (step,) = trace.facts.steps
    assert (step.rows, step.loss, step.metrics) == ([], None, [])


def test_a_parameter_that_is_frozen_at_first_is_trained_from_then_on(tmp_path: Path) -> None:
    """It is none of those that must not move, and what each pass makes of its gradient is seen."""
    frozen = build_model()
    frozen[0].requires_grad_(False)
    model, optimizer, records = begin(tmp_path, frozen)
    for step in range(2):
        model[0].weight.requires_grad_(step > 0)
        update(model, optimizer, records)
        optimizer.zero_grad()
    trace = end(records, tmp_path)
    assert trace.facts.frozen == ["0.bias"] and "0.weight" in trace.facts.trainable
    first, second = ({name for one in read_local_gradients(trace, 0, step) for name in one} for step in (0, 1))
    assert "2.weight" in first and second - first == {"0.weight"}


def test_recording_changes_neither_numbers_nor_random_states(tmp_path: Path) -> None:
    def run(recorded: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = nn.Sequential(build_model(), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        records = build_world(tmp_path).records(model, optimizer) if recorded else None
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            if records:
                records.gradients()
            optimizer.step()
            if records:
                records.step(rows=range(8), loss=0.0)
        return [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()

    (with_, state), (without, expected) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))
    assert torch.equal(state, expected)


@pytest.mark.parametrize(
    ("clear", "clean"), [("before the forward pass", True), ("after it", True), ("to zeros", True), ("never", False)]
)
def test_gradients_that_are_left_are_noticed_when_backward_adds_to_them(
    tmp_path: Path, clear: str, clean: bool
) -> None:
    model, optimizer, records = begin(tmp_path)
    for _ in range(2):
        if clear == "before the forward pass":
            optimizer.zero_grad()
        loss = model(DATA).square().mean()
        if clear in ("after it", "to zeros"):
            optimizer.zero_grad(set_to_none=clear == "after it")
        loss.backward()
        backward(model)  # a second micro-batch adds to the first, as it should
        optimizer.step()
        records.step()
    assert [step.clean for step in end(records, tmp_path).facts.steps] == [True, clean]


@pytest.mark.parametrize(("cleared", "clean"), [(True, True), (False, False)])
def test_gradients_that_another_loss_leaves_count_only_if_an_update_is_made_of_them(
    tmp_path: Path, cleared: bool, clean: bool
) -> None:
    """In the canonical order of a GAN, the generator's loss adds to gradients that the discriminator then clears."""
    generator, discriminator = nn.Linear(3, 3), build_model()
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (generator, discriminator))
    records = build_world(tmp_path).records(nn.ModuleList([generator, discriminator]), theirs)
    ours.register_step_pre_hook(lambda *_: records.before_update(ours))
    for _ in range(2):
        fake = generator(DATA)
        if cleared:
            discriminator.zero_grad()
        discriminator(fake.detach()).mean().backward()
        theirs.step()
        records.step()
        generator.zero_grad()
        discriminator(fake).mean().backward()
        ours.step()
        records.step()
    trace = end(records, tmp_path)
    assert [step.clean for step in trace.facts.steps] == [True, True, clean, True]
    updated = {name[0] for name in trace.tensors("raw gradients", 3)}
    assert updated == {"0"}, "the discriminator's gradients are not of this update"


class Switched(nn.Sequential):
    """Computes otherwise in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else x  # type: ignore[no-any-return]


def test_a_model_that_comes_later_is_recorded_beside_the_first_under_its_number(tmp_path: Path) -> None:
    """A new head, say, on the body that was trained before."""
    body = nn.Linear(3, 4)
    model, optimizer, records = begin(tmp_path, Switched(body, nn.Linear(4, 1)))
    update(model, optimizer, records)
    model.eval()
    for _ in range(2):
        later = nn.Sequential(body, nn.Linear(4, 2))
        optimizer.add_param_group({"params": later[1].parameters()})
        records.follow(later)
        update(later, optimizer, records)
    records.before_backward()
    assert records.seen.evaluating == [""], "the first one is still the root"
    trace = end(records, tmp_path)
    heads = ["1.weight", "model-2.1.weight", "model-3.1.weight"]
    for step in range(3):
        parameters = trace.tensors("parameters", step)
        assert sorted(name for name in parameters if "weight" in name) == ["0.weight", *heads[: step + 1]]
    assert "optimizer/model-3.1.weight/momentum_buffer" in trace.tensors("optimizer state", 2)


@pytest.mark.parametrize("same", [True, False])
def test_an_optimizer_of_parameters_that_were_replaced_is_told_by_the_shapes_of_others(
    tmp_path: Path, same: bool
) -> None:
    old, model = build_model(), build_model() if same else nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    _, optimizer, records = begin(tmp_path, nn.ParameterList(old.parameters()))
    del old
    gc.collect()  # models of other tests, too
    update(model, optimizer, records)
    trace = end(records, tmp_path)
    assert bool(trace.facts.replaced) == same
    failed = [one for one in invariants.check_invariants(trace) if one.mark == "FAIL"]
    found = diagnosis.diagnose(trace, trace, failed, 1)
    assert found is not None
    assert found.fault == ("The optimizer was built before wrapping" if same else "There is no gradient")


@pytest.mark.parametrize(("dropout", "draws", "random"), [(0.5, False, True), (0.0, True, True), (0.0, False, False)])
def test_a_forward_pass_or_a_loss_that_draws_is_noticed(
    tmp_path: Path, dropout: float, draws: bool, random: bool
) -> None:
    model, optimizer, records = begin(tmp_path, nn.Sequential(build_model(), nn.Dropout(dropout)))
    loss = model(DATA).square().flatten()
    (loss[torch.randperm(8)[:4]] if draws else loss).mean().backward()
    records.before_backward()
    torch.rand(3)  # the script's own draws are not the model's
    optimizer.step()
    records.step()
    assert end(records, tmp_path).facts.random is random


def test_the_perturbed_run_begins_with_other_last_bits(tmp_path: Path) -> None:
    plain = [parameter.detach().clone() for parameter in build_model().parameters()]
    model, _, _ = begin(tmp_path, perturbed=1e-3)
    for before, now in zip(plain, model.parameters(), strict=True):
        assert not torch.equal(before, now)
        torch.testing.assert_close(now.detach(), before, rtol=1.1e-3, atol=0)


def test_tied_weights_are_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    begin(tmp_path, model)
    assert list(read_initial(tmp_path)) == ["0.weight"]


def test_wrappers_leave_no_mark_in_names(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"block": nn.Linear(2, 2), "submodule": nn.Linear(2, 1)})})
    begin(tmp_path, nn.ModuleDict({"module": nn.ModuleDict({"_forward_module": inner})}))
    assert sorted(read_initial(tmp_path)) == ["block.bias", "block.weight", "submodule.bias", "submodule.weight"]


def test_names_that_become_the_same_are_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))
            self.module = nn.ParameterDict({"gain": nn.Parameter(torch.ones(1))})

    with pytest.raises(ConfigError, match="two tensors would be called 'gain'"):
        begin(tmp_path, Twice())


def test_a_moving_average_is_recorded(tmp_path: Path) -> None:
    model = build_model()
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.5), AveragedModel(model)
    records = build_world(tmp_path).records(model, optimizer, ema=ema)
    backward(model)
    optimizer.step()
    ema.update_parameters(model)
    records.step()
    assert set(end(records, tmp_path).tensors("EMA", 0)) == set(dict(model.named_parameters()))


def test_evaluation_may_be_recorded_twice_and_not_more(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    update(model, optimizer, records)
    records.evaluation({"loss": 0.5})
    records.evaluation({"loss": torch.tensor(0.25)})
    facts = end(records, tmp_path).facts
    assert (facts.evaluation, facts.evaluation_again) == ([{"loss": 0.5}], [{"loss": 0.25}])
    with pytest.raises(ConfigError, match="called at most twice"):
        records.evaluation({"loss": 0.5})


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    with pytest.raises(ConfigError, match="no update was recorded"):
        records.close()
    with pytest.raises(ConfigError, match=r"was called for step 1, but the recorded optimizer made no update"):
        records.step()
    backward(model)
    optimizer.step()
    with pytest.raises(ConfigError, match="a second update before step 1 was recorded"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"records\(\) was called a second time in one run"):
        begin(tmp_path)  # whose files would take the place of those of the first
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=r"a Linear is not a torch\.optim\.Optimizer"):
        build_world(other).records(build_model(), nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"started on 2 processes, but the recorder finds a group of 1"):
        begin(other, size=2)


# two processes --------------------------------------------------------------------------------------------------------


def on_two(place: ProcessInfo, group: Communicator, folder: Path, kind: str) -> None:
    """Two steps, each process on its half of the rows."""
    model: nn.Module = build_model()
    if kind == "fsdp1":
        with pytest.raises(ConfigError, match="keeps parameters in flat pieces"):
            begin(folder, FullyShardedDataParallel(model, device_id=torch.device("cpu")), rank=place.rank, size=2)
        return
    if kind == "sharded":
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    records = build_world(folder, place.rank, 2).records(model, optimizer)
    if kind == "owned":  # each process keeps the state of every other parameter
        others = [*model.parameters()][1 - place.rank :: 2]
        optimizer.register_step_post_hook(lambda *_: [optimizer.state.pop(p) for p in others])
    mine = slice(place.rank, None, 2)
    for _ in range(2):
        loss = backward(model, mine)
        optimizer.step()
        optimizer.zero_grad()
        reported = {"loss": loss} if place.is_first else None
        records.step(rows=list(range(8))[mine], loss=loss if place.is_first else None, metrics=reported)
    records.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("alone")
    model, optimizer, records = begin(folder)
    for _ in range(2):
        update(model, optimizer, records)
        optimizer.zero_grad()
    return end(records, folder)


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_two_processes_leave_the_trace_of_one(tmp_path: Path, alone: Trace, kind: str) -> None:
    processes.run(on_two, 2, tmp_path, kind)
    trace = Trace(tmp_path)
    for step in trace.facts.steps:
        assert (step.rows, step.by_rank) == (list(range(8)), [[0, 2, 4, 6], [1, 3, 5, 7]])
        assert (step.lr, len(step.metrics), step.replicas) == ([[0.5], [0.5]], 1, [])
        assert step.clean is (True if kind == "ddp" else None)
    for moment in ("raw gradients", "optimizer state", "parameters"):
        ours, theirs = trace.tensors(moment, 1), alone.tensors(moment, 1)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_state_that_only_its_owner_keeps_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "owned").mkdir()
    for kind in ("all", "owned"):
        processes.run(on_two, 2, tmp_path / kind, kind)
    ours, theirs = (Trace(tmp_path / kind).tensors("optimizer state", 0) for kind in ("owned", "all"))
    assert ours.keys() == theirs.keys() and len(ours) == 4
    assert Trace(tmp_path / "owned").tensors("state of rank 1", 0).keys() < ours.keys()


def on_halves(place: ProcessInfo, group: Communicator, folder: Path) -> None:
    """One step of an optimizer that reduces gradients by itself and keeps half of the state on each process."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    records = build_world(folder, place.rank, 2).records(model, optimizer)
    backward(model, slice(place.rank, None, 2))
    own = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    def reduce(*_: Any) -> None:
        for parameter, gradient in zip(model.parameters(), own, strict=True):
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient / 2)  # type: ignore[union-attr]

    def cut(*_: Any) -> None:
        for state in optimizer.state.values():
            half = len(state["momentum_buffer"]) // 2
            if half:
                piece = slice(place.rank * half, (place.rank + 1) * half)
                state["momentum_buffer"] = state["momentum_buffer"][piece].clone()

    optimizer.register_step_pre_hook(reduce)
    optimizer.register_step_post_hook(cut)
    optimizer.step()
    records.step()
    records.close()


def test_pieces_of_the_state_and_gradients_that_are_reduced_inside_of_a_step_are_whole(
    tmp_path: Path, alone: Trace
) -> None:
    processes.run(on_halves, 2, tmp_path)
    assert Trace(tmp_path).facts.steps[0].replicas == []
    for moment in ("raw gradients", "optimizer state"):
        ours, theirs = Trace(tmp_path).tensors(moment, 0), alone.tensors(moment, 0)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_copies_that_drift_apart_are_named_with_their_ranks(tmp_path: Path) -> None:
    processes.run(on_two, 2, tmp_path, "not wrapped")
    assert Trace(tmp_path).facts.steps[1].replicas[0] == "'0.weight' is not the same on ranks [0] and [1]"


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    processes.run(on_two, 2, tmp_path, "fsdp1")


def test_a_clipping_that_changes_nothing_is_none_and_of_two_the_first_counts(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    backward(model)
    before = records.copy_gradients()
    records.keep_unclipped(before)  # the norm alone was measured
    optimizer.step()
    records.step()
    backward(model)
    before = records.copy_gradients()
    for first in (True, False):
        nn.utils.clip_grad_norm_(list(model.parameters())[: 2 if first else 4], 1e-3)
        records.keep_unclipped(before if first else records.copy_gradients())
    optimizer.step()
    records.step()
    trace = end(records, tmp_path)
    assert trace.tensors("clipped gradients", 0) == {}
    np.testing.assert_array_equal(trace.tensors("raw gradients", 1)["0.weight"], before["0.weight"].numpy())
    assert np.linalg.norm(trace.tensors("clipped gradients", 1)["0.weight"]) < 2e-3


def test_a_teacher_inside_of_a_model_is_not_trained_and_a_body_that_no_optimizer_holds_is_told(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 1), "teacher": nn.Linear(3, 4)})
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.SGD([*model["head"].parameters(), *model["teacher"].parameters()], lr=0.5)
    records = build_world(tmp_path).records(model, optimizer)
    for _ in range(2):
        model["head"](model["body"](DATA)).square().mean().backward()
        optimizer.step()
        records.step()
        with torch.no_grad():
            model["teacher"].weight.lerp_(model["body"].weight, 0.1)
    trace = end(records, tmp_path)
    assert trace.facts.frozen == ["teacher.bias"]
    assert trace.facts.untrained == ["body.weight", "body.bias"]
    marks = {c.quantity: c.mark for c in invariants.check_invariants(trace)}
    assert marks["frozen parameters did not move"] == "PASS"
    assert marks["trained parameters moved"] == "ABSTAIN"


def test_models_are_found_in_the_order_of_their_optimizers() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (second, first)]
    found = trained_model.find_model(optimizers)
    assert [tuple(p.shape) for p in found.parameters() if p.dim() == 2] == [(3, 4), (4, 3)]


def test_gradients_by_autograd_grad_are_added_to_nothing(tmp_path: Path) -> None:
    model, optimizer, records = begin(tmp_path)
    parameters = list(model.parameters())
    for _ in range(2):
        gradients = torch.autograd.grad(model(DATA).square().mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        records.step()
    assert [step.clean for step in end(records, tmp_path).facts.steps] == [None, None]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_whose_gradients_come_later_is_refused(tmp_path: Path, by_name: bool) -> None:
    model, optimizer, _ = begin(tmp_path)

    def closure() -> torch.Tensor:
        return backward(model)

    with pytest.raises(ConfigError, match=r"step\(\) of step 1 was given a closure"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    backward(model)
    optimizer.step(closure=None)
