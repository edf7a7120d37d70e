"""The step of `puzzles` in JAX as XLA compiles it for an H200, on a host without one: what it reads and writes.

    python -m pip install --no-deps --target build/xla-gpu jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION
    python -m benchmarks.xla_gpu [--plugin build/xla-gpu] [--cuda /usr/local/cuda] [--rows 768] [--hlo FILE] [WORD …]

VERSION is that of jax; CUDA is needed for `ptxas` and `libdevice` alone. The words are those of `unisono train
puzzles`, beside TRM-MLP as published. Nothing is run: kernels of products are not tried out, so XLA takes the first
that it would try, and which is fastest stays open; what is written and read between them does not depend on it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.hlo_bytes import Kernel, kernels

SHOWN = 12
BANDWIDTH = 4.8e12 * 0.95  # bytes a second, as `unisono plan` counts
# What XLA knows of an H200, from its own table (openxla/xla, xla/backends/gpu/target_config/specs/h200.txtpb).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_address_bits: 64 pcie_bandwidth: 34359738368 name: "NVIDIA H200"
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


def devices(plugin: Path, cuda: Path) -> list[Any]:
    """GPUs that can be compiled for, and nothing else. To be called before JAX starts."""
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={cuda}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    (library,) = plugin.glob("jax_plugins/xla_cuda*/xla_cuda_plugin.so")
    interface = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    known = xla_bridge.canonicalize_platform
    # Where there is no GPU, JAX knows no platform of the name that it gives to one (jax-ml/jax#23971).
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else known(name)
    topology = xla_client.make_c_api_device_topology(interface, "", target_config=H200, topology="1x1x1")
    found: list[Any] = topology._make_compile_only_devices()
    return found


def compile_step(words: list[str], rows: int, device: Any) -> Any:
    """The step of a run on one device, compiled."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from unisono.engines.jax.numerics import precision
    from unisono.engines.jax.parallel.mesh import DEVICES, Grid
    from unisono.launch.model.check import first_micro_batch
    from unisono.task import run_setup
    from unisono.task_config import build_task, load_config
    from unisono_plan.jax_trace import _Parts

    config = load_config("puzzles", words)[0]
    alone = {"world_size": 1, "strategy": "single", "micro_batch": rows, "device": "cpu"}
    config = config.model_copy(update={"layout": config.layout.model_copy(update=alone)})
    task = build_task(config)
    run_setup(task)
    micro = first_micro_batch(task, config)
    precision.pin(config.train.precision)
    grid = Grid(Mesh(np.array([[device]]), DEVICES))
    parts = _Parts.build(task, config, grid, micro)
    given = replace(parts.state(), carry=parts.spread(parts.carry, 1)), parts.constants, parts.spread(parts.batch, 1)
    where = grid.replicated
    step = jax.jit(parts.step(1), donate_argnums=0, in_shardings=where, out_shardings=where)
    return step.trace(*given, parts.inputs).lower(lowering_platforms=("cuda",)).compile()


def describe(found: list[Kernel]) -> list[str]:
    """Tables of what is moved."""
    lines = ["| kernels | GB | ms |", "|---|---|---|"]
    for name, of_products in (("products", True), ("all others", False)):
        moved = sum(kernel.moved for kernel in found if kernel.is_product == of_products)
        lines.append(f"| {name} | {moved / 1e9:.1f} | {1e3 * moved / BANDWIDTH:.1f} |")
    lines += ["", "| other kernels, the heaviest | times | MB read | MB written | GB in all |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, int, int], list[Kernel]] = {}
    for kernel in found:
        if not kernel.is_product:
            groups.setdefault((kernel.shape, kernel.read, kernel.written), []).append(kernel)
    heaviest = sorted(groups.values(), key=lambda group: -sum(kernel.moved for kernel in group))
    for group in heaviest[:SHOWN]:
        first, times, moved = group[0], sum(one.times for one in group), sum(one.moved for one in group)
        read, written = first.read / 1e6, first.written / 1e6
        what = f"`{first.traced.rsplit('/', 1)[-1]}` {first.shape.split('{')[0].lstrip('(')}"
        lines.append(f"| {what} | {times} | {read:.0f} | {written:.0f} | {moved / 1e9:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of `unisono train puzzles`")
    parser.add_argument("--plugin", type=Path, default=Path("build/xla-gpu"), help="folder of the packages")
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"), help="folder of CUDA")
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--hlo", type=Path, help="file for the compiled program")
    given = parser.parse_args()
    if not given.plugin.is_dir():
        sys.exit(f"{given.plugin} is missing: install the packages as `--help` says")
    (device,) = devices(given.plugin, given.cuda)
    words = [
        "model=trm_mlp", "data.side=9", "data.clues=[30,34]", f"data.puzzles={2 * given.rows}", "data.held_out=8",
        f"train.global_batch={given.rows}", "train.precision=bf16", "layout.engine=jax", *given.words,
    ]  # fmt: skip
    began = time.monotonic()
    compiled = compile_step(words, given.rows, device)
    text = compiled.as_text()
    if given.hlo:
        given.hlo.write_text(text, encoding="utf-8")
    print(f"lowered and compiled in {time.monotonic() - began:.0f} s, ", end="")
    print(f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.1f} GB beside the state\n")
    print("\n".join(describe(kernels(text))))


if __name__ == "__main__":
    main()
