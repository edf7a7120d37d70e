"""How devices share the work and the state: one mesh of replicas × shards for every strategy.

`single` is 1 × 1, `ddp` N × 1, `fsdp` 1 × N, `hsdp` N/S × S. Every device computes whole micro-batches inside one
`shard_map`, so it runs the same program as a single device would. All communication between devices is defined here:
parameters are gathered before use, gradients are added up where their parameter lies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unisono.config.schema.layout import Layout
from unisono.runtime.errors import ConfigError

REPLICA, SHARD = "replica", "shard"
DEVICES = (REPLICA, SHARD)  # both axes: one slice for every device
Arrays = Mapping[str, jax.Array]
_REGATHERED = {"all_gather", "broadcast_in_dim", "pad", "reshape", "slice", "squeeze", "transpose"}
_SMALL = 1 << 16  # numbers of a gradient that is summed together with others: to copy it costs less than to begin a sum


@dataclass(frozen=True)
class Grid:
    """The devices of a run as replicas × shards.

    Attributes:
        mesh: with the axes `replica` and `shard`; device `r · shards + s` computes the micro-batches
            `[(r · shards + s) · passes, …)` of the global batch. Without devices (abstract) it can be traced alone.
    """

    mesh: Mesh | AbstractMesh

    @classmethod
    def from_layout(cls, layout: Layout, devices: Sequence[jax.Device]) -> Grid:
        """The grid of a layout.

        Args:
            layout: concrete.
            devices: of all processes, those of a process in a row.

        Raises:
            ConfigError: where their number does not fit the layout.
        """
        count = len(devices)
        shards = {"single": 1, "ddp": 1, "fsdp": count, "hsdp": layout.shards or count}[layout.strategy]
        if layout.strategy == "single" and count > 1:
            raise ConfigError(f"layout.strategy=single uses one device, but there are {count}; use ddp, fsdp or hsdp")
        if count % shards:
            raise ConfigError(f"layout.shards={shards} does not divide the {count} devices of the run")
        return cls(Mesh(np.array(devices).reshape(count // shards, shards), DEVICES))

    @classmethod
    def single_device(cls, device: jax.Device) -> Grid:
        """The grid of a single device."""
        return cls(Mesh(np.array([[device]]), DEVICES))

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are CPUs; those that an abstract mesh stands for are not."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return int(self.mesh.shape[REPLICA])

    @property
    def shards(self) -> int:
        """Devices that share a copy."""
        return int(self.mesh.shape[SHARD])

    @property
    def devices(self) -> int:
        """Of all processes."""
        return self.replicas * self.shards

    @cached_property
    def first_local_index(self) -> int:
        """The index in the grid of this process's first device; its others follow."""
        here = jax.process_index()
        assert isinstance(self.mesh, Mesh)
        return next(index for index, device in enumerate(self.mesh.devices.flat) if device.process_index == here)

    def spec(self, shape: Sequence[int]) -> PartitionSpec:
        """How an array of the state is cut: its longest axis that the shards divide evenly, or not at all."""
        axes = [axis for axis, size in enumerate(shape) if size and size % self.shards == 0]
        if self.shards == 1 or not axes:
            return PartitionSpec()
        cut = max(axes, key=lambda axis: (shape[axis], -axis))
        return PartitionSpec(*(SHARD if axis == cut else None for axis in range(cut + 1)))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on these devices."""
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding:
        """The same on every device."""
        return self.sharding(PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of arrays (passes, devices, …)."""
        return self.sharding(BATCH)

    def per_device(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function that every device calls on its own part of the arguments."""
        # Without the check a task may begin a scan with zeros as on one device; what is equal everywhere is made so
        # by the sums below, and compared by `replicas`.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


BATCH = PartitionSpec(None, DEVICES)
REPLICATED = PartitionSpec()


def gather(array: jax.Array, spec: PartitionSpec, dtype: Any) -> jax.Array:
    """A whole parameter from its shards, in the dtype of the computation; its gradient is added up in its own dtype."""
    axis = _sharded_axis(spec)
    return array.astype(dtype) if axis is None else _all_gather_shards(array, axis, jnp.dtype(dtype))


def _sharded_axis(spec: PartitionSpec) -> int | None:
    return next((axis for axis, name in enumerate(spec) if name == SHARD), None)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_shards(array: jax.Array, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.all_gather(array.astype(dtype), SHARD, axis=axis, tiled=True)


def _all_gather_forward(array: jax.Array, axis: int, dtype: Any) -> tuple[jax.Array, Any]:
    # The primitive itself: `regather_in_backward` would keep what a function with a gradient of its own returns.
    return jax.lax.all_gather(array.astype(dtype), SHARD, axis=axis, tiled=True), jnp.zeros((0,), array.dtype)


def _all_gather_backward(axis: int, dtype: Any, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(like.dtype)  # a sum over devices in bf16 would lose what each has found
    return (jax.lax.psum_scatter(wide, SHARD, scatter_dimension=axis, tiled=True),)


_all_gather_shards.defvjp(_all_gather_forward, _all_gather_backward)


def scatter(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
    """This device's shard of the sum over shards of a whole gradient; what `gather` does by itself when it is left."""
    axis = _sharded_axis(spec)
    return gradient if axis is None else jax.lax.psum_scatter(gradient, SHARD, scatter_dimension=axis, tiled=True)


def regather_in_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose backward pass gathers parameters again instead of keeping the whole ones.

    Nor does it keep views and padded copies, since those of a whole parameter are as large as it is.
    """

    def keeps(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name not in _REGATHERED

    return jax.checkpoint(function, policy=keeps)


def find_transposed_products(function: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a function returns, and which arrays of the dictionary that it returns first are transposed products.

    JAX makes the gradient of `w` in `x @ w` as the transpose of a matrix product. XLA for CPU folds the two into a
    product of a form for which it has no fast kernel, unless something stands between them (0.10.2: 5 to 9 % of the
    step of a transformer). `sum_gradients` puts the sum over devices there.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)()
    result = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)())
    makers = {variable: equation for equation in closed.jaxpr.eqns for variable in equation.outvars}

    def is_made_by(variable: Any, primitive: str) -> bool:
        return isinstance(variable, Var) and variable in makers and makers[variable].primitive.name == primitive

    found = {
        name
        for name, variable in zip(sorted(shapes[0]), closed.jaxpr.outvars, strict=False)
        if is_made_by(variable, "transpose") and is_made_by(makers[variable].invars[0], "dot_general")
    }
    return result, found


def sum_gradients(
    gradients: Arrays, specs: Mapping[str, PartitionSpec], reports: jax.Array, transposed: Collection[str] = ()
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The sums of gradients over all devices, or of a shard's over its copies: `gather` has added up the shards.

    Small ones travel in one vector, as every collective has its latency: gloo makes one of each array, and fifteen of
    128 numbers took ten times as long as one of all of them. What devices report, (n, numbers), travels with them and
    comes back as by `all_gather`: a sum with the zeros of the other devices. Those of `transposed` are summed as their
    transposes, behind a barrier, since XLA removes the sum over one device.
    """
    own = jnp.arange(jax.lax.axis_size(DEVICES)) == device_index()
    apart = jnp.where(own[:, None, None], reports, jnp.zeros_like(reports)).reshape(-1, reports.shape[-1])
    barrier = jax.lax.optimization_barrier
    arrays = [*(barrier(value.T) if name in transposed else value for name, value in gradients.items()), apart]
    axes = [REPLICA if SHARD in tuple(specs[name]) else DEVICES for name in gradients] + [DEVICES]
    together: dict[Any, list[int]] = {}
    for number, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        alone = array.size > _SMALL or jax.lax.axis_size(axis) == 1
        together.setdefault(number if alone else (axis, array.dtype), []).append(number)
    for numbers in together.values():
        ends = np.cumsum([arrays[number].size for number in numbers])[:-1]
        whole = jnp.concatenate([arrays[number].ravel() for number in numbers]) if len(ends) else arrays[numbers[0]]
        axis = axes[numbers[0]]
        # XLA for CPU runs a sum of every device with itself; over one device in all it removes it.
        total = jax.lax.psum(whole, axis) if axis == DEVICES or jax.lax.axis_size(axis) > 1 else whole
        for number, part in zip(numbers, jnp.split(total, ends) if len(ends) else [total], strict=True):
            arrays[number] = part.reshape(arrays[number].shape)
    summed = zip(gradients, arrays, strict=False)
    return {name: value.T if name in transposed else value for name, value in summed}, arrays[-1]


def device_index() -> jax.Array:
    """The number of this device in the grid; inside `Grid.per_device`."""
    return jax.lax.axis_index(DEVICES)


def all_gather(array: jax.Array) -> jax.Array:
    """Arrays (n, …) of all devices as one (devices · n, …), in the order of the devices; inside `Grid.per_device`."""
    return jax.lax.all_gather(array, DEVICES, axis=0, tiled=True)
