"""What each backward pass of a process makes before anything is reduced, seen by hooks of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.proof.recording.gradient_sample import sample_elements
from unisono.proof.recording.trace import Array, Trace, write_tensors


class LocalGradients:
    """Keeps a sample of every gradient, backward pass by backward pass; hooks change no number.

    Args:
        parameters: by name. Those that `fully_shard` has cut into pieces are left out: their hooks see nothing.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._passes: list[dict[str, Array]] = [{}]
        self._unwatched: dict[str, Tensor] = {}
        self._known: dict[int, Tensor] = {}  # by `id`, which must not be given to others
        self.add(parameters)

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Watch these as well; those that have taken the place of others (a new head) have their names."""
        new = {n: p for n, p in parameters.items() if id(p) not in self._known and not isinstance(p, DTensor)}
        self._known |= {id(parameter): parameter for parameter in new.values()}
        self._unwatched |= new  # some parameters are frozen at first
        for name in [name for name, parameter in self._unwatched.items() if parameter.requires_grad]:
            parameter = self._unwatched.pop(name)
            parameter.register_hook(partial(self._keep, name, parameter))

    def _keep(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is None:  # what passes before have made was cleared, and no update will be made of it
            for one in self._passes:
                one.pop(name, None)
            self._passes = [one for one in self._passes if one] or [{}]
        if name in self._passes[-1]:  # every pass makes each gradient once
            self._passes.append({})
        seen = dense(gradient.detach())
        whole = seen.to(torch.complex128 if seen.is_complex() else torch.float64)
        self._passes[-1] |= sample_elements({name: whole.cpu().resolve_conj().numpy()})

    @property
    def has_gradient(self) -> bool:
        """Whether a pass since the last call of `write` or `clear` has made one that is not zero."""
        return any(value.any() for one in self._passes for value in one.values())

    def clear(self) -> None:
        """Forget what was seen since then."""
        self._passes = [{}]

    def write(self, folder: Path, rank: int, step: int) -> None:
        """Write what was seen since the last call; every process writes a file of its own."""
        seen = {f"{number}/{name}": value for number, one in enumerate(self._passes) for name, value in one.items()}
        if seen:
            write_tensors(folder, _moment(rank), step, seen)
        self.clear()


def dense(gradient: Tensor) -> Tensor:
    """A gradient as a dense tensor; of an embedding it may be sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def dense_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of all parameters that have one, as they are now."""
    return {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None}


def read_local_gradients(trace: Trace, rank: int, step: int) -> list[dict[str, Array]]:
    """Elements of what each backward pass of a rank made, pass by pass; none where nothing was seen."""
    passes: dict[int, dict[str, Array]] = {}
    for key, value in trace.tensors(_moment(rank), step).items():
        number, _, name = key.partition("/")
        passes.setdefault(int(number), {})[name] = value
    return [passes[number] for number in sorted(passes)]


def _moment(rank: int) -> str:
    return f"local gradients {rank}"
