"""Follows tensors between a forward pass and `backward`: which were there before and go past the model into the loss.

Targets of a script without a `DataLoader` are such tensors. What is made of the model's outputs is none, nor what is
made anew (`torch.arange(len(outputs))`). It also tells draws that reach the loss from those of the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.proof.scripts.replay.row_exchange import RowExchange

_DRAWS = {
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like", "randn_like",
    "randint_like", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_", "dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout", "rrelu", "gumbel_softmax", "scaled_dot_product_attention",
}  # fmt: skip
_NUMBERS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__"}
_OWN = "an output of the model"  # in place of one among its inputs


class _Origin(NamedTuple):
    graph: bool = False  # the model's outputs or parameters
    old: frozenset[int] = frozenset()  # tensors that were there before the pass, by their numbers
    drawn: bool = False  # random numbers


class LossInputs(TorchFunctionMode):
    """Watches every function of torch while a pass is under way, outside of the model.

    Args:
        hear: is told of functions that are called between passes, and not of what was drawn.

    Attributes:
        drawn: whether random numbers have gone into what `backward` is called on.
        draws: whether any were drawn.
        own_draws: whether some of them follow what the model returned, so that nothing can stand in place of them.
        numbers: whether numbers were read of tensors that are not made of the model's outputs: none can follow them.
    """

    def __init__(self, hear: Callable[[str, Sequence[Tensor]], None] = lambda name, given: None) -> None:
        super().__init__()
        self._hear = hear
        self.exchange: RowExchange | None = None
        self.window = -1
        self.is_open = False
        self.is_paused = self.is_closed = False
        self.drawn = self.draws = self.own_draws = self.numbers = False
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._given: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # in place of others
        self._returned: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # outputs, and what is made of them
        self._old: list[Tensor] = []

    def begin_forward(self) -> None:
        """A trained module is called; the first time since `backward`, a pass begins."""
        if not self.is_open:
            self.window += 1
            self.is_open, self.drawn, self.draws, self.own_draws = True, False, False, False
            self._origins, self._given = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
            self._old = []
        self.is_paused = True

    def end_forward(self, outputs: Any) -> None:
        """It has returned."""
        self.is_paused = False
        self._set_origin(outputs, _Origin(graph=True))

    def end_pass(self) -> None:
        """`backward` is called."""
        self.is_open = False
        self._old = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without looking at what is computed inside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def exchange_inputs(self, given: Any) -> Any:
        """The arguments of a trained module as they are to be used; what it is given of itself stays.

        So does the state that it has left in a pass before: one process is to compute that by itself.
        """
        assert self.exchange is not None
        leaves, spec = tree_flatten(given)
        own = {number: leaf for number, leaf in enumerate(leaves) if self._is_made(leaf) or self._is_carried(leaf)}
        plain = tree_unflatten([_OWN if number in own else leaf for number, leaf in enumerate(leaves)], spec)
        taken = tree_flatten(self.exchange.take_inputs(self.window, plain))[0]
        return tree_unflatten([own.get(number, leaf) for number, leaf in enumerate(taken)], spec)

    def leave_out_carried(self, given: Any) -> Any:
        """The arguments without what is no row: a state that a pass before has left. All if no row remains."""
        if not any(map(self._is_carried, tree_leaves(given))):
            return given
        rows = tree_map(lambda leaf: None if self._is_carried(leaf) else leaf, given)
        return rows if any(isinstance(leaf, Tensor) for leaf in tree_leaves(rows)) else given

    def _is_made(self, leaf: Any) -> bool:
        """Whether it is made of what the model returned in this pass, with or without a gradient."""
        if not isinstance(leaf, Tensor):
            return False
        with torch._C.DisableTorchFunction():
            known: _Origin | None = self._origins.get(leaf)
            return leaf.requires_grad or bool(known and known.graph)

    def _is_carried(self, leaf: Any) -> bool:
        """Whether it is made of what the model returned in a pass before."""
        if not isinstance(leaf, Tensor):
            return False
        with torch._C.DisableTorchFunction():
            return leaf in self._returned and not self._is_made(leaf)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function while the mode is on."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.is_paused or self.is_closed:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self.is_open:
            result = func(*args, **kwargs)  # called here, since a mode below looks for who has called
            self._follow_between(name, given, result)
            return result
        origins = [self._find_origin(tensor) for tensor in given]
        graph = any(origin.graph for origin in origins)
        old = frozenset[int]().union(*(origin.old for origin in origins))
        draws = name in _DRAWS
        drawn = draws or any(origin.drawn for origin in origins)
        self.draws |= draws
        if graph:
            self.drawn |= drawn
            if self.exchange is not None:
                for number in old:
                    self.exchange.keep_beside(self.window, number, self._old[number])
        elif given and name in _NUMBERS and not drawn:
            self.numbers = True
        if self._given:
            args, kwargs = tree_map(self._replace, (args, dict(kwargs)))
        result = func(*args, **kwargs)
        if draws and not graph and isinstance(result, Tensor):  # targets, or noise of the rows: kept as they would be
            self._number(result, drawn=True)
            return result
        self.own_draws |= draws
        self._set_origin(result, _Origin(graph, old, drawn))
        return result

    def _follow_between(self, name: str, given: Sequence[Tensor], result: Any) -> None:
        """Between passes batches are made: whole numbers that are read then, and not drawn, may be counts of rows."""
        with torch._C.DisableTorchFunction():
            drawn = name in _DRAWS or any(origin.drawn for one in given if (origin := self._origins.get(one)))
            if any(one in self._returned for one in given):
                self._note_returned(result)
            counts = bool(given) and not (given[0].is_floating_point() or given[0].requires_grad)
        if drawn:
            self._set_origin(result, _Origin(drawn=True))
        else:
            self._hear(name, given)
        self.numbers |= name in _NUMBERS and counts and not drawn

    def _find_origin(self, tensor: Tensor) -> _Origin:
        with torch._C.DisableTorchFunction():
            if tensor.requires_grad:
                return _Origin(graph=True)
            known: _Origin | None = self._origins.get(tensor)
            if known is not None:
                return known
            return self._number(tensor)

    def _number(self, tensor: Tensor, *, drawn: bool = False) -> _Origin:
        """Give a tensor that is not of the model a number, and take what stands in place of it."""
        with torch._C.DisableTorchFunction():
            number = len(self._old)
            self._old.append(tensor)
            found = _Origin(old=frozenset([number]), drawn=drawn)
            self._origins[tensor] = found
            if self.exchange is not None:
                other = self.exchange.take_beside(self.window, number, tensor)
                if other is not tensor:
                    self._given[tensor], self._origins[other] = other, found
            return found

    def _replace(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunction():
            return self._given.get(value, value)

    def _set_origin(self, result: Any, origin: _Origin) -> None:
        with torch._C.DisableTorchFunction():
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not (leaf in self._origins and origin == self._origins[leaf]):
                    self._origins[leaf] = origin
        if origin.graph:
            self._note_returned(result)

    def _note_returned(self, result: Any) -> None:
        with torch._C.DisableTorchFunction():
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not isinstance(leaf, torch.nn.Parameter):
                    self._returned[leaf] = True
