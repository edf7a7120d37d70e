"""What `unisono prove train.py` says of what a script computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.proof.small_scripts import JOINED, SEEDED, STEP, SYNCHRONISED, prove
from unisono.proof.scripts.judging import self_check
from unisono.runtime.errors import ConfigError, RunError

LOW_KERNEL = """
class Squares(torch.autograd.Function):
    @staticmethod
    def forward(context, rows, weight, bias):
        outputs = rows @ weight.t() + bias
        context.save_for_backward(rows, outputs)
        return outputs.square().mean()

    @staticmethod
    def backward(context, gradient):
        rows, outputs = context.saved_tensors
        each = (2 * outputs / outputs.numel() * gradient).float()
        return None, (each.t() @ rows.float()).to(rows.dtype), each.sum(0).to(rows.dtype)
"""


@pytest.mark.slow
def test_a_kernel_that_casts_in_its_backward_pass_is_computed_in_fp64(tmp_path: Path) -> None:
    """As fused losses do: what float32 rounds there would look like a fault of 1e-8."""
    loop = "x = torch.randn(8, 3)\nfor _ in range(4):\n    step(x[dist.get_rank()::dist.get_world_size()])\n"
    step = STEP.replace("model(x).square().mean()", "Squares.apply(x, model.weight, model.bias)")
    report = prove(tmp_path, SEEDED + LOW_KERNEL + step + loop)
    assert report.mark == "PASS", report.lines
    worst = max(c.worst.size for c in report.verdicts[0].compared if c.quantity == "raw gradients")
    assert worst < 1e-12


DRAWN_TARGETS = """
torch.manual_seed(dist.get_rank())
for _ in range(4):
    outputs = model(torch.randn(8, 3))
    targets = torch.randn(8, 1)
    (outputs - targets).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= SCALE
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "mark"), [("dist.get_world_size()", "PASS"), ("1", "FAIL")])
def test_targets_that_are_drawn_after_the_forward_pass_are_given_to_one_process(
    tmp_path: Path, scale: str, mark: str
) -> None:
    report = prove(tmp_path, SEEDED + DRAWN_TARGETS.replace("SCALE", scale))
    assert report.mark == mark, report.lines
    assert "raw gradients" in {c.quantity for c in report.verdicts[0].compared if c.mark == mark}


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch",
    [
        "if x.dtype == torch.float64:\n    raise TypeError('no kernel for this')\n",
        "if dist.get_rank() and x.dtype == torch.float64:\n    raise TypeError('no kernel for this')\n",
    ],
    ids=["on one process", "on many alone"],
)
def test_a_script_without_fp64_is_compared_in_fp32(tmp_path: Path, batch: str) -> None:
    text = SYNCHRONISED + batch + "for _ in range(9):\n    step(x[dist.get_rank()::dist.get_world_size()])\n"
    report = prove(tmp_path, text, precision=None)
    assert report.mark == "PASS", report.lines
    (verdict,) = report.verdicts
    assert min(c.allowed for c in verdict.compared if c.quantity == "raw gradients") >= 1e-5


@pytest.mark.slow
def test_a_script_with_rows_in_float32_is_compared_in_fp64(tmp_path: Path) -> None:
    """It began again in fp32, with a floor of 1e-5."""
    rows = "import numpy as np\nx = torch.from_numpy(np.ones((8, 3), np.float32))\n"
    text = SYNCHRONISED + rows + "for _ in range(9):\n    step(x[dist.get_rank()::dist.get_world_size()])\n"
    report = prove(tmp_path, text, precision=None)
    assert report.mark == "PASS", report.lines
    (verdict,) = report.verdicts
    assert max(c.allowed for c in verdict.compared if c.quantity == "raw gradients") < 1e-8


SINGLE = """
import numpy as np
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(np.ones(3, np.float32)))
    def forward(self, x):
        return x @ self.weight
model = Own()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))
for _ in range(9):
    step(x[dist.get_rank()::dist.get_world_size()])
"""


@pytest.mark.slow
def test_parameters_that_stay_single_in_fp64_are_judged_in_single_precision(tmp_path: Path) -> None:
    report = prove(tmp_path, SYNCHRONISED + SINGLE, precision=None)
    assert report.mark == "PASS", report.lines
    assert min(c.allowed for c in report.verdicts[0].compared if c.quantity == "raw gradients") >= 1e-5
    with pytest.raises(RunError, match="in fp64, weight stays in a lower precision"):
        prove(tmp_path, SYNCHRONISED + SINGLE)


WARM_UP = (
    "optimizer.param_groups[0]['lr'] = 0.0\nfor _ in range(9):\n    step(x[dist.get_rank()::dist.get_world_size()])\n"
)


@pytest.mark.slow
def test_a_rate_of_0_is_no_fault_of_training(tmp_path: Path) -> None:
    report = prove(tmp_path, SYNCHRONISED + WARM_UP, steps=1)
    assert report.mark == "PASS", report.lines
    assert any("the learning rate is 0 in all of these steps" in line for line in report.lines)


@pytest.mark.slow
def test_an_unseeded_script_is_still_checked_against_itself(tmp_path: Path) -> None:
    text = JOINED + STEP + "model.weight.data.normal_(generator=torch.Generator().manual_seed(torch.seed() % 97))\n"
    text += "for p in model.parameters():\n    dist.broadcast(p.data, 0)\n"
    text += "for _ in range(9):\n    step(x * (1 + dist.get_rank()))\n"
    report = prove(tmp_path, text)
    told = "\n".join(report.lines)
    assert report.mark == "ABSTAIN", told
    assert "the script does not repeat" in told and "rounding alone" not in told
    (verdict,) = report.verdicts
    assert "gradients are equal on all ranks" in {c.quantity for c in verdict.invariants if c.mark == "PASS"}


OWN_PART = """
from torch.utils.data import DataLoader, Subset, TensorDataset
rank, size = dist.get_rank(), dist.get_world_size()
draw = torch.Generator().manual_seed(1)
whole = TensorDataset(torch.randn(32, 3, generator=draw))
data = Subset(whole, range(rank, 32, size))
scale = 1.0
for (rows,) in DataLoader(data, 8 // size):
    step(rows * scale)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "mark", "first"),
    [
        ("", "", "PASS", ""),
        (
            "data = Subset(whole, range(rank, 32, size))",
            "data = Subset(whole, range(32 // size))",
            "FAIL",
            "sample ids",
        ),
        ("scale = 1.0", "scale = 1 + whole.tensors[0][rank::size].mean()", "ABSTAIN", ""),
    ],
)
def test_rows_of_a_data_set_for_each_rank_are_told_by_what_the_model_is_given(
    tmp_path: Path, old: str, new: str, mark: str, first: str
) -> None:
    report = prove(tmp_path, SYNCHRONISED + OWN_PART.replace(old, new), steps=2)
    (verdict,) = report.verdicts
    assert (report.mark, verdict.first.quantity if verdict.first else "") == (mark, first), report.lines
    assert any("data set of its own" in note for note in verdict.notes) == (mark != "FAIL")


PARTS = """
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, up, down = torch.nn.Linear(3, 5), torch.nn.Linear(5, 9), torch.nn.Linear(9, 1)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.mine = slice(rank * 9 // size, (rank + 1) * 9 // size)
        self.up = torch.nn.Parameter(up.weight.data if WHOLE else up.weight.data[self.mine].clone())
        self.down = torch.nn.Parameter(down.weight.data if WHOLE else down.weight.data[:, self.mine].clone())

    def forward(self, x):
        up, down = (self.up[self.mine], self.down[:, self.mine]) if WHOLE else (self.up, self.down)
        return Add.apply(torch.relu(Copy.apply(self.first(x)) @ up.T) @ down.T)

torch.manual_seed(0)
model = Parts()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for rows in torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(1)):
    model(rows).square().mean().backward()
    for p in [model.up, model.down] * WHOLE:
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("correct", [True, False])
def test_layers_that_ranks_compute_together_by_hand(tmp_path: Path, whole: bool, correct: bool) -> None:
    """All ranks get the same rows, and hold whole parameters of which each uses 4 or 5 of 9 rows, or those alone."""
    text = JOINED + PARTS.replace("WHOLE", str(whole))
    report = prove(tmp_path, text if correct else text.replace("dist.all_reduce(gradient)", "pass"))
    (verdict,) = report.verdicts
    assert report.mark == ("PASS" if correct else "FAIL"), report.lines
    assert any("up, which one process has whole" in (c.why or "") for c in verdict.invariants) == (not whole)
    first = verdict.first
    assert correct or (first and first.quantity == "raw gradients"), report.lines


SPARSE = """
table = torch.nn.Embedding(9, 2, sparse=True)
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
rank, size = dist.get_rank(), dist.get_world_size()
for rows in torch.arange(32).remainder(9).split(8):
    optimizer.zero_grad()
    table(rows[rank::size]).square().mean().backward()
    given = table.weight.grad.coalesce()
    several = [[None] * size for _ in range(2)]
    dist.all_gather_object(several[0], given.indices())
    dist.all_gather_object(several[1], given.values() / size)
    table.weight.grad = torch.sparse_coo_tensor(torch.cat(several[0], 1), torch.cat(several[1]), table.weight.shape)
    optimizer.step()
"""


@pytest.mark.slow
def test_sparse_gradients_of_an_embedding_are_compared(tmp_path: Path) -> None:
    report = prove(tmp_path, SEEDED + SPARSE)
    assert report.mark == "PASS", report.lines
    wrong = prove(tmp_path, SEEDED + SPARSE.replace("given.values() / size", "given.values()"))
    first = wrong.verdicts[0].first
    assert first is not None and first.quantity == "raw gradients", wrong.lines


UNEVEN = """
model = torch.nn.parallel.DistributedDataParallel(model)
whole = torch.randn(28, 3, generator=torch.Generator().manual_seed(1)).split(8)
rank, size = dist.get_rank(), dist.get_world_size()
parts = [rows[rank::size] for rows in whole]
with model.join():
    for rows in parts if rank == 0 else parts[:3]:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_updates_before_a_rank_runs_out_of_batches_can_be_proved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 has no more batches after 3 updates, .* with steps=3$"):
        prove(tmp_path, SEEDED + UNEVEN)
    report = prove(tmp_path, SEEDED + UNEVEN, steps=3)
    assert report.mark == "PASS", report.lines


@pytest.mark.slow
def test_a_rank_that_runs_out_of_batches_later_than_was_asked_for_refuses_nothing(tmp_path: Path) -> None:
    """Seven updates are there on one process, and a rank makes five of them."""
    text = UNEVEN.replace("28, 3", "56, 3").replace("[:3]", "[:5]")
    report = prove(tmp_path, SEEDED + text)
    assert report.mark == "PASS", report.lines
    assert "updates after the first 4" in "\n".join(report.lines)


BY_ROW = """
from torch.func import functional_call, grad, vmap
x = torch.arange(24.0).reshape(8, 3) / 24
by_row = vmap(grad(lambda weights, row: functional_call(model, weights, (row[None],)).square().sum()), (None, 0))
for number in range(4):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, gradient in by_row(weights, x[dist.get_rank() :: dist.get_world_size()]).items():
        p = model.get_parameter(name)
        p.grad = (gradient / (1 + gradient.flatten(1).norm(dim=1).view(-1, *[1] * p.dim()))).sum(0)
        dist.all_reduce(p.grad)
    optimizer.step()
"""


@pytest.mark.slow
def test_gradients_of_single_rows_by_function_transforms_are_recorded_from_the_update_on(tmp_path: Path) -> None:
    report = prove(tmp_path, SYNCHRONISED + BY_ROW, steps=2)
    assert report.mark == "PASS", report.lines
    assert "parameters" in {c.quantity for c in report.verdicts[0].compared if c.mark == "PASS"}


OWNERS = """
class Owned(torch.optim.Optimizer):
    def step(self):
        for number, p in enumerate(self.param_groups[0]["params"]):
            if number % dist.get_world_size() == dist.get_rank():
                kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.data.sub_(kept.mul_(0.9).add_(p.grad), alpha=0.1)
        for number, p in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(p.data, number % dist.get_world_size())
optimizer = Owned(model.parameters(), {})
optimizer.param_groups[0]["lr"] = 0.1
x = torch.arange(24.0).reshape(8, 3) / 24
for _ in range(4):
    step(x[dist.get_rank() :: dist.get_world_size()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
def test_state_that_each_rank_keeps_of_its_own_parameters_is_compared(tmp_path: Path, complete: bool) -> None:
    text = OWNERS if complete else OWNERS.replace("            dist.broadcast", "            number or dist.broadcast")
    report = prove(tmp_path, SYNCHRONISED + text, steps=2)
    (verdict,) = report.verdicts
    assert report.mark == ("PASS" if complete else "FAIL"), report.lines
    assert "optimizer state" in {c.quantity for c in verdict.compared if c.mark == "PASS"} or not complete
    assert complete or verdict.diagnosis is not None, report.lines
    assert complete or verdict.diagnosis.fault == "Replicas drift apart", report.lines  # type: ignore[union-attr]


REDUCING = """
class Reducing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            whole = p.grad.clone()
            dist.all_reduce(whole)
            p.grad.copy_(whole / dist.get_world_size())
        super().step()
class InPieces(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            whole = p.grad.clone()
            dist.all_reduce(whole)
            size = dist.get_world_size()
            piece = slice(dist.get_rank() * len(p) // size, (dist.get_rank() + 1) * len(p) // size)
            kept = self.state[p].setdefault("momentum", torch.zeros_like(p[piece]))
            kept.mul_(0.9).add_(whole[piece] / size)
            parts = [torch.empty_like(kept) for _ in range(size)]
            dist.all_gather(parts, p[piece] - 0.1 * kept)
            p.copy_(torch.cat(parts))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
optimizer = Reducing(model.parameters(), lr=0.1, momentum=0.9)
x = torch.arange(24.0).reshape(8, 3) / 24
for _ in range(4):
    model(x[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "mark", "fault"),
    [
        ("", "", "PASS", ""),
        ("p.grad.copy_(whole / dist.get_world_size())", "p.grad.copy_(whole)", "FAIL", "All gradients are scaled by N"),
        (
            "Reducing(model.parameters(), lr=0.1, momentum=0.9)",
            "InPieces(model.parameters(), {'lr': 0.1})",
            "ABSTAIN",
            "",
        ),
    ],
)
def test_an_optimizer_that_reduces_inside_of_its_step_is_judged_by_what_it_leaves(
    tmp_path: Path, old: str, new: str, mark: str, fault: str
) -> None:
    report = prove(tmp_path, JOINED + REDUCING.replace(old, new), steps=2)
    (verdict,) = report.verdicts
    assert (report.mark, verdict.diagnosis.fault if verdict.diagnosis else "") == (mark, fault), report.lines
    found = {c.quantity: c for c in verdict.compared}
    assert (found["raw gradients"].why == self_check.INSIDE) == (mark == "ABSTAIN"), report.lines
    assert mark == "FAIL" or (found["optimizer state"].mark, found["parameters"].mark) == ("PASS", "PASS"), report.lines
