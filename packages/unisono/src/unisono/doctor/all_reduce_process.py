"""One process of the all-reduce measurement."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

from unisono.doctor.rates import RESULT
from unisono.launch import cluster
from unisono.launch.processes import rank_process

_SIZE = 2**26  # bytes
_TIMES = 8
_DEADLINE = 60.0  # seconds


def main(folder: Path) -> None:
    """Reduce a tensor with the other processes, and write how long it took."""
    rank_process.die_with_parent()
    place = cluster.process_info()
    assert place is not None

    def work() -> None:
        import torch
        import torch.distributed as dist

        from unisono.engines.torch import devices
        from unisono.engines.torch.parallel import process_group

        device = devices.select_device((folder / "device").read_text(encoding="utf-8"), place)
        group = process_group.start(place, device, _DEADLINE, _DEADLINE)
        tensor = torch.ones(_SIZE // 4, device=device)
        with process_group.translate_peer_errors(place, "an all-reduce", _DEADLINE):
            dist.all_reduce(tensor)
            group.barrier("the start of the measurement")
            began = perf_counter()
            for _ in range(_TIMES):
                dist.all_reduce(tensor)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds = (perf_counter() - began) / _TIMES
        if place.is_first:
            (folder / RESULT).write_text(f"{seconds} {_SIZE}", encoding="utf-8")

    rank_process.run_and_exit(work, place, report=folder / "logs" / f"rank-{place.rank:05d}.fault.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
