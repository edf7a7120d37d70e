"""Consistency checks after the first update and after every N-th.

Each is cheap (one pass over the parameters, a few numbers per tensor to other ranks) and each catches a fault that
leaves the loss falling: an optimizer on stale parameters, replicas that drift apart, a master dtype that is not the
configured one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn

from unisono.engines import rules
from unisono.engines.observers import Observer, StepResult
from unisono.optim.sharded import local
from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.errors import GuardError
from unisono.runtime.fault_names import FaultName

_CHUNK_ELEMENTS = 1 << 22  # elements at a time
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UpdateGuard(Observer):
    """Checks the first update of a process, and every N-th of the run.

    Args:
        module: laid out.
        dtype: of its master weights.
        every: N.
        check_replicas: compares the copies after the given number of updates; collective.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, every: int, check_replicas: Callable[[int], None]
    ) -> None:
        self._module, self._dtype, self._every, self._check_replicas = module, dtype, every, check_replicas
        self._is_first = True
        self._before: dict[str, int] | None = None

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """If the update is to be checked, remember the parameters' digests before it."""
        checked = self._is_first or (step + 1) % self._every == 0
        self._is_first = False
        parameters = dict(self._module.named_parameters()) if checked else {}
        self._before = digests(parameters) if checked else None
        self._with_gradient = [
            name for name, p in parameters.items() if p.grad is not None and bool(local(p.grad).any())
        ]
        # Of an ordinary rate, the first parameter says so.
        self._is_visible = any(exceeds_rounding(parameters[name], scalars["lr"]) for name in self._with_gradient)

    def on_step_end(self, step: int, result: StepResult) -> None:
        """Check the parameters after the update; collective.

        Raises:
            GuardError: see `rules.check_moved`, `check_dtype` and `check_copies`.
        """
        if result.skipped or self._before is None:
            return
        after = digests(dict(self._module.named_parameters()))
        rules.check_moved(self._before, after, self._with_gradient, lambda: self._is_visible)
        check_dtype(self._module, self._dtype)
        self._check_replicas(step + 1)


def exceeds_rounding(parameter: Tensor, lr: float) -> bool:
    """Whether an update at this rate changes an element by more than rounding loses.

    An optimizer that divides by the gradient's size changes an element by about the rate, others by the rate times the
    gradient; the smaller counts.
    """
    assert parameter.grad is not None
    value, gradient = local(parameter.detach()).abs(), local(parameter.grad).abs()
    update = lr * gradient.to(value.dtype).clamp(max=1.0)
    return bool((update > torch.finfo(value.dtype).eps * value).any())


def digest(tensor: Tensor) -> int:
    """A signed 64-bit number that changes when any bit of the local part changes, computed on the tensor's device."""
    flat = local(tensor.detach()).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(torch.uint8) if flat.dtype == torch.bool else flat.view(_INTEGER_DTYPES[flat.element_size()])
    return _hash_bytes(bits) if bits.device.type == "cpu" else _weighted_sum(bits)


def _hash_bytes(bits: Tensor) -> int:
    """XXH3 of the bytes; limited by memory bandwidth."""
    return int.from_bytes(xxhash.xxh3_64_digest(bits.numpy().data), signed=True)


def _weighted_sum(bits: Tensor) -> int:
    """The sum of integers weighted by position, in chunks; sums wrap, so the order of addition does not matter."""
    places = torch.arange(min(_CHUNK_ELEMENTS, bits.numel()), device=bits.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _CHUNK_ELEMENTS):
        piece = bits[first : first + _CHUNK_ELEMENTS].to(torch.int64)
        if bits.element_size() == 8:  # else the highest bits, the sign first, would be lost to the wrap
            piece = piece ^ ((piece >> 32) & 0xFFFFFFFF)
        total += (piece * places[: piece.numel()]).sum() + 2 * first * piece.sum()
    return int(total)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of every tensor by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that the optimizer's parameters are the model's trainable ones, the very same objects, each once.

    Raises:
        GuardError: naming the parameters that would not train.
    """
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lost = [name for name, parameter in trainable.items() if id(parameter) not in held]
    stale = len(set(held) - {id(parameter) for parameter in trainable.values()})
    if len(held) != len(set(held)):
        raise GuardError(
            f"the optimizer holds {len(held) - len(set(held))} parameters twice, and would move them twice",
            fault=FaultName.PARAMETER_HELD_TWICE,
        )
    if lost or stale:
        raise GuardError(
            f"the optimizer does not hold the model's parameters: {len(lost)} are missing "
            f"({rules.format_names(lost)}), and {stale} of its own are not in the model. It was built before the model "
            "was wrapped, or the model was changed afterwards.",
            fault=FaultName.OPTIMIZER_BEFORE_WRAPPING,
        )


def check_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Check that every floating-point parameter that is trained has the master dtype; a frozen base may have less.

    Raises:
        GuardError: naming the parameters of another dtype.
    """
    kept = (dtype, dtype.to_complex())
    wrong = [
        f"{name} ({p.dtype})"
        for name, p in model.named_parameters()
        if p.requires_grad and (p.is_floating_point() or p.is_complex()) and p.dtype not in kept
    ]
    if wrong:
        raise GuardError(
            f"the master weights should be {dtype}, but these are not: {rules.format_names(wrong)}",
            fault=FaultName.MASTER_WEIGHTS_DTYPE,
        )


def find_differing(
    communicator: Communicator, tensors: Mapping[str, Tensor], replicas: Sequence[Sequence[int]], what: str
) -> list[str]:
    """Tensors whose copies differ between ranks, each with a short description and the ranks of either side.

    Args:
        communicator: of all ranks.
        tensors: this rank's tensors by name.
        replicas: groups of ranks that hold copies of each other.
        what: is compared, for the message if the wait times out.

    Returns:
        The same list on every rank; if several groups differ in a tensor, only the first is named.
    """
    if all(len(ranks) < 2 for ranks in replicas):
        return []
    everyone = communicator.gather(digests(tensors), what)
    differing = []
    for name in dict.fromkeys(name for rank in everyone for name in rank):
        for ranks in replicas:
            sides: dict[int | None, list[int]] = {}
            for rank in ranks:
                sides.setdefault(everyone[rank].get(name), []).append(rank)
            if len(sides) > 1:
                differing.append(f"'{name}' is not the same on ranks {' and '.join(map(str, sides.values()))}")
                break
    return differing


def check_copies(
    communicator: Communicator, copies: Mapping[str, Tensor], replicas: Sequence[Sequence[int]], step: int
) -> None:
    """Check that copies of parameters, of their average and of the optimizer's state are the same bits on all ranks.

    Args:
        communicator: of all ranks.
        copies: this rank's by name, parameters first.
        replicas: groups of ranks that hold copies of each other.
        step: after which they are compared, from 1.

    Raises:
        GuardError: on every rank, naming the first array that differs and the ranks.
    """
    _check_same(
        communicator, copies, replicas, f"the digests of all ranks after step {step}", f"replicas differ: step {step},",
        FaultName.REPLICA_DRIFT,
        "Gradients were not synchronised (a forward that bypasses the wrapper, a parameter changed outside the "
        "optimizer), or randomness depends on the rank.",
    )  # fmt: skip


def check_buffers(communicator: Communicator, buffers: Mapping[str, Tensor], step: int) -> None:
    """Check that all ranks hold the same bits of shared buffers; see `check_copies`."""
    everyone = [range(communicator.size)]
    _check_same(
        communicator, buffers, everyone, f"the digests of all ranks after step {step}",
        f"replicas differ: step {step},", FaultName.LOCAL_BUFFERS,
        "The model changes this buffer from the rows it sees, and every process sees different rows: reduce it over "
        "processes in the model, or do not change it in training.",
    )  # fmt: skip


def check_initial_weights(communicator: Communicator, model: nn.Module) -> None:
    """Check that all ranks begin with the same parameters, before they are sharded; see `check_copies`."""
    _check_same(
        communicator, dict(model.named_parameters()), [range(communicator.size)], "the initial weights of all ranks",
        "initial parameters differ:", FaultName.INITIALISATION_BY_RANK,
        "build() must draw from torch's default generator, which is seeded for it, or use a fixed seed.",
    )  # fmt: skip


def _check_same(
    communicator: Communicator, tensors: Mapping[str, Tensor], replicas: Sequence[Sequence[int]],
    waited: str, what: str, fault: str, advice: str,
) -> None:  # fmt: skip
    if differing := find_differing(communicator, tensors, replicas, waited):
        more = f"{len(differing)} of {len(tensors)} tensors differ"
        raise GuardError(f"{what} {differing[0]} ({more}). {advice}", fault=fault)
