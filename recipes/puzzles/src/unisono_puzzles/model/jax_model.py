"""The recursive models in JAX, as Equinox modules; their arrays have the names and shapes of those in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from unisono_puzzles.data.formats import Format
from unisono_puzzles.model import sparse_attention
from unisono_puzzles.model.act import StepOutput
from unisono_puzzles.model.shape import CUT_STD, EPS, ROPE_BASE, Kind, Kinds, inner_width, places
from unisono_puzzles.settings import Model

Turns = tuple[Array, Array] | None
# GPUs multiply 16-bit matrices on their fast units only where rows begin at multiples of 16 bytes, and 81 cells with a
# prefix of 16 are 97 places. torch's compiler pads such products by itself; XLA does not.
ALIGNMENT = 8


class PuzzleModel(eqx.Module):
    """One network, or two, applied to an answer state and a latent state in cycles."""

    kinds: dict[str, KindParts]
    nets: list[Network]
    q_head: Linear
    answer_start: Array
    latent_start: Array
    config: Model = eqx.field(static=True)

    def __init__(self, config: Model, kinds: Kinds, key: Array) -> None:
        self.config = config
        of_kinds, of_nets, one, other = jax.random.split(key, 4)
        self.kinds = {
            name: KindParts(config, kind, its)
            for (name, kind), its in zip(kinds.items(), jax.random.split(of_kinds, len(kinds)), strict=True)
        }
        self.nets = [Network(config, kinds, its) for its in jax.random.split(of_nets, config.nets)]
        self.q_head = Linear(jnp.zeros((2, config.width)), jnp.full((2,), -5.0))  # almost never halt at first
        self.answer_start = _truncated_normal(one, (config.width,), 1.0)
        self.latent_start = _truncated_normal(other, (config.width,), 1.0)

    @property
    def starts(self) -> dict[str, Array]:
        """The first value of each state, (width,); they are not trained."""
        return {
            "answer_state": jax.lax.stop_gradient(self.answer_start),
            "latent_state": jax.lax.stop_gradient(self.latent_start),
        }

    def __call__(self, kind: str, rows: Mapping[str, Array], h_cycles: int, l_cycles: int) -> StepOutput:
        """One supervision step; see the torch model's."""
        config, parts = self.config, self.kinds[kind]
        shown = parts.shown(rows["question"], rows["identifier"])
        turns = parts.turns()

        def update(net: Network, x: Array) -> Array:
            return net(x, kind, turns)

        stop = jax.lax.stop_gradient
        frozen = jax.tree.map(lambda leaf: stop(leaf) if eqx.is_array(leaf) else leaf, self.nets)

        states = rows["answer_state"].astype(shown.dtype), rows["latent_state"].astype(shown.dtype)
        length = shown.shape[1]
        shown, *states_ = (_pad_places(x, config) for x in (shown, *states))
        states = states_[0], states_[1]
        if config.gradient == "all":

            def whole(carried: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
                answer, latent = carried
                latent = _repeat(lambda x: update(self.nets[0], x + answer + shown), latent, l_cycles)
                return (update(self.nets[-1], answer + latent), latent), answer

            states, befores = jax.lax.scan(whole, states, None, length=h_cycles)
            before = befores[-1]
        else:

            def cycle(_: int, states: tuple[Array, Array]) -> tuple[Array, Array]:
                answer, latent = states
                frame = answer + stop(shown)
                latent = jax.lax.fori_loop(0, l_cycles, lambda _, x: update(frozen[0], x + frame), latent)
                return update(frozen[-1], answer + latent), latent

            answer, latent = stop(jax.lax.fori_loop(0, h_cycles - 1, cycle, stop(states)))
            before = answer
            turns_without = l_cycles - 1 if config.gradient == "step" else 0
            still = answer + stop(shown)
            latent = stop(jax.lax.fori_loop(0, turns_without, lambda _, x: update(frozen[0], x + still), latent))
            frame = answer + shown
            latent = _repeat(lambda x: update(self.nets[0], x + frame), latent, l_cycles - turns_without)
            states = update(self.nets[-1], answer + latent), latent
        answer, latent = (state[:, :length] for state in states)
        before = before[:, :length]
        change = jnp.square(answer - stop(before)).mean((1, 2))
        return StepOutput(answer, latent, parts.head(answer[:, config.prefix :]), self.q_head(answer[:, 0]), change)


class KindParts(eqx.Module):
    """What a model has for one kind of puzzle: from its tokens to features, and back."""

    tokens: Embedding
    head: Linear
    puzzles: Embedding | None
    places: Embedding | None
    config: Model = eqx.field(static=True)
    kind: Kind = eqx.field(static=True)

    def __init__(self, config: Model, kind: Kind, key: Array) -> None:
        self.config, self.kind = config, kind
        scale = config.width**-0.5
        tokens, head, place = jax.random.split(key, 3)
        self.tokens = Embedding(_truncated_normal(tokens, (kind.format.vocabulary, config.width), scale))
        self.head = _linear(head, config.width, kind.format.vocabulary)
        self.puzzles = Embedding(jnp.zeros((kind.embeddings, config.embedding))) if config.embedding else None
        learned = config.positions == "learned"
        shape = (places(kind, config), config.width)
        self.places = Embedding(_truncated_normal(place, shape, scale)) if learned else None

    def shown(self, question: Array, identifier: Array) -> Array:
        """The question as the network sees it, (rows, places, width): the puzzle embedding, and the cells."""
        config = self.config
        cells = self.tokens.weight[question.astype(jnp.int32)]
        front = jnp.zeros((len(cells), config.prefix * config.width), cells.dtype)
        if self.puzzles is not None:
            of_puzzle = self.puzzles.weight[identifier].astype(cells.dtype)
            front = jnp.pad(of_puzzle, ((0, 0), (0, front.shape[1] - config.embedding)))
        shown = jnp.concatenate([front.reshape(-1, config.prefix, config.width), cells], axis=1)
        if self.places is not None:
            shown = (shown + self.places.weight) * 0.5**0.5
        return jnp.asarray(shown * config.width**0.5)

    def turns(self) -> Turns:
        """Cosines and sines of RoPE, (places, half the features of a head); None where places are not turned."""
        if self.config.positions != "rope":
            return None
        half = self.config.width // self.config.heads // 2
        angles = np.arange(places(self.kind, self.config))[:, None] * ROPE_BASE ** (-np.arange(half) / half)
        dtype = self.tokens.weight.dtype
        return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


class Network(eqx.Module):
    """The layers of one network."""

    layers: list[Layer]

    def __init__(self, config: Model, kinds: Kinds, key: Array) -> None:
        self.layers = [Layer(config, kinds, its) for its in jax.random.split(key, config.layers)]

    def __call__(self, x: Array, kind: str, turns: Turns) -> Array:
        """(rows, places, width) -> the same."""
        for layer in self.layers:
            x = layer(x, kind, turns)
        return x


class Layer(eqx.Module):
    """Cells see each other, then each is changed by itself; RMSNorm without parameters after each sum."""

    attention: Attention | None
    mixers: dict[str, SwiGLU] | None
    swiglu: SwiGLU

    def __init__(self, config: Model, kinds: Kinds, key: Array) -> None:
        one, other = jax.random.split(key)
        mixes = config.mixer == "mlp"
        self.attention = None if mixes else Attention(config, kinds, one)
        keys = jax.random.split(one, len(kinds))
        lengths = {name: places(kind, config) for name, kind in kinds.items()}
        made = zip(lengths.items(), keys, strict=True)
        self.mixers = {name: SwiGLU(length, config, its) for (name, length), its in made} if mixes else None
        self.swiglu = SwiGLU(config.width, config, other)

    def __call__(self, x: Array, kind: str, turns: Turns) -> Array:
        """(rows, places, width) -> the same."""
        if self.mixers is not None:
            turned, mixer = jnp.swapaxes(x, 1, 2), self.mixers[kind]  # the norm is over the places, too
            x = jnp.swapaxes(_norm(turned + mixer(turned), mixer.features), 1, 2)
        else:
            assert self.attention is not None
            x = _norm(x + self.attention(x, kind, turns))
        return _norm(x + self.swiglu(x))


class Attention(eqx.Module):
    """Multi-head attention without a mask, dense or to the neighbours in the grid."""

    qkv: Linear
    out: Linear
    config: Model = eqx.field(static=True)
    formats: tuple[tuple[str, Format], ...] = eqx.field(static=True)

    def __init__(self, config: Model, kinds: Kinds, key: Array) -> None:
        one, other = jax.random.split(key)
        self.config, self.formats = config, tuple((name, kind.format) for name, kind in kinds.items())
        self.qkv, self.out = _linear(one, config.width, 3 * config.width), _linear(other, config.width, config.width)

    def __call__(self, x: Array, kind: str, turns: Turns) -> Array:
        """(rows, places, width) -> the same."""
        rows, length, width = x.shape
        query, key, value = jnp.moveaxis(self.qkv(x).reshape(rows, length, 3, self.config.heads, -1), 2, 0)
        if turns is not None:
            query, key = _turn(query, turns), _turn(key, turns)
        if self.config.mixer == "sparse":
            format_, prefix = dict(self.formats)[kind], self.config.prefix
            seen = jnp.asarray(sparse_attention.counted_once(format_, prefix))
            query, key, value = (jnp.swapaxes(part, 1, 2) for part in (query, key, value))
            mixed = sparse_attention.attend(query, key, value, format_, prefix, seen, jax.nn.softmax)
            mixed = jnp.swapaxes(mixed, 1, 2)
        else:
            mixed = _attend(query, key, value)
        return self.out(mixed.reshape(rows, length, width))


class SwiGLU(eqx.Module):
    """`down(silu(gate) · up)` over the last axis, without biases."""

    gate_up: Linear
    down: Linear

    def __init__(self, features: int, config: Model, key: Array) -> None:
        one, other = jax.random.split(key)
        inner = inner_width(features, config)
        self.gate_up, self.down = _linear(one, features, 2 * inner), _linear(other, inner, features)

    @property
    def features(self) -> int:
        """Of its input and output."""
        return int(self.down.weight.shape[0])

    def __call__(self, x: Array) -> Array:
        """(…, features) -> the same; more features that are zeros stay zeros."""
        extra = x.shape[-1] - self.features
        # Two products: the gradient of one for both would be put together from its halves, by a copy.
        gate, up = jnp.split(jnp.pad(self.gate_up.weight, ((0, 0), (0, extra))), 2)
        down = Linear(jnp.pad(self.down.weight, ((0, extra), (0, 0))))
        made: Array = _gated_product(Linear(gate)(x), Linear(up)(x), down)
        return made


@jax.checkpoint
def _gated_product(gate: Array, up: Array, down: Linear) -> Array:
    """`down(silu(gate) · up)`, whose backward pass computes all that is element-wise again from gate and up.

    Otherwise five arrays of their size are kept: the gate's sigmoid, its derivative, and each factor.
    """
    return down(jax.nn.silu(gate) * up)


class Linear(eqx.Module):
    """`x @ weightᵀ + bias`."""

    weight: Array
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        """(…, inputs) -> (…, outputs)."""
        result = x @ self.weight.T.astype(x.dtype)
        return result if self.bias is None else result + self.bias.astype(x.dtype)


class Embedding(eqx.Module):
    """A table of vectors."""

    weight: Array


def _norm(x: Array, features: int | None = None) -> Array:
    """RMSNorm over the last axis, of which `features` are not padding."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.square(wide).sum(-1, keepdims=True) / (features or x.shape[-1])
    return (wide * jax.lax.rsqrt(mean + EPS)).astype(x.dtype)


def _pad_places(x: Array, config: Model) -> Array:
    """(rows, places, width), with places of zeros up to a multiple of `ALIGNMENT`, where products are over places.

    They stay zeros in every layer, so no other number changes. In more than 16 bits, nothing is gained by them.
    """
    aligned = config.mixer == "mlp" and x.dtype.itemsize == 2
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % ALIGNMENT if aligned else 0), (0, 0)))


def _attend(query: Array, key: Array, value: Array) -> Array:
    """Dense attention on (rows, places, heads, features); `jax.nn.dot_product_attention` has no fp64."""
    scores = jnp.einsum("rqhf,rkhf->rhqk", query * query.shape[-1] ** -0.5, key)
    shares = jax.nn.softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), axis=-1)
    return jnp.einsum("rhqk,rkhf->rqhf", shares.astype(value.dtype), value)


def _turn(x: Array, turns: tuple[Array, Array]) -> Array:
    """RoPE on (rows, places, heads, features): the first half of the features of each head with the second."""
    cosines, sines = (part.astype(x.dtype)[:, None] for part in turns)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cosines - other * sines, other * cosines + one * sines], axis=-1)


def _repeat(function: Callable[[Array], Array], x: Array, times: int) -> Array:
    """A function with a gradient applied so many times, and no loop: one copies what it keeps for the gradient."""
    for _ in range(times):
        x = function(x)
    return x


def _linear(key: Array, inputs: int, outputs: int) -> Linear:
    return Linear(_truncated_normal(key, (outputs, inputs), inputs**-0.5))


def _truncated_normal(key: Array, shape: tuple[int, ...], std: float) -> Array:
    """Normal, cut off at two standard deviations, and widened so that `std` is that of what is left."""
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) * (std / CUT_STD)
