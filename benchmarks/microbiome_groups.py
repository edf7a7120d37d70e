"""Micro-batches of a global batch: rows in their order, of similar cost, and as many as cost the same; time, memory.

    python -m benchmarks.microbiome_groups DIR [--steps 12] [--repeats 3]

`DIR` is as for `benchmarks/microbiome.py`. Eight rows at a time (`data.group_by_length=null`, `8`), or eight on average
(`balanced`). Each run is a process of its own with one thread, in fp64, in turn; time is that of the processor for the
whole run, and the peak is of the process above what it has before training. All train on the same rows, so their
parameters differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_RUN = """
import json, resource, sys, time
import torch
import unisono
from pathlib import Path
from benchmarks.microbiome import study
from unisono_microbiome.settings import LossWeights, MicrobiomeConfig, ModelSettings
from unisono_microbiome.task import Microbiome
data, groups, steps, folder = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = ModelSettings(features=128, heads=4, encoder="taxon", taxon_layers=2, sample_layers=2)
of_data = study(data, 0, group_by_length=groups)
task = Microbiome(MicrobiomeConfig(weights=LossWeights(distance=1.0)), model=model, data=of_data)
task.library.distances()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
changes = {"optim.lr": 1e-3, "train.steps": steps, "train.global_batch": 64, "train.precision": "fp64",
           "layout.world_size": 1, "layout.threads": 1, "layout.micro_batch": 8, "eval.at_end": False,
           "eval.every": None, "checkpoint.every": None, "run.dir": folder, "run.name": "r", "observe.progress": False}
start = time.process_time()
result = unisono.train(task, changes)
took = time.process_time() - start
trained = unisono.open_run(result.folder, task=Microbiome).load_model(precision="fp64")
weights = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])
torch.save(weights, folder + "/weights.pt")
print(json.dumps({"seconds": took, "peak": (peak() - before) * 1024}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    told: dict[str, list[dict[str, float]]] = {"null": [], "8": [], '"balanced"': []}
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(arguments.repeats):
            for groups, runs in told.items():
                folder = Path(name) / f"{json.loads(groups)}-{repeat}"
                folder.mkdir()
                words = [str(arguments.data), groups, str(arguments.steps), str(folder)]
                done = subprocess.run([sys.executable, "-c", _RUN, *words], check=True, capture_output=True, text=True)
                runs.append(json.loads(done.stdout.splitlines()[-1]))
        import torch

        first, *others = (
            torch.load(Path(name) / f"{json.loads(groups)}-0/weights.pt", weights_only=True) for groups in told
        )
    medians = {
        groups: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for groups, runs in told.items()
    }
    print(f"largest difference of a parameter: {max((first - other).abs().max().item() for other in others):.1e}")
    for key, unit in (("seconds", "s"), ("peak", "bytes")):
        before = medians["null"][key]
        for groups, values in medians.items():
            print(
                f"{key}, {json.loads(groups) or 'in the order'}: {values[key]:.4g} {unit}, {values[key] / before:.2f}"
            )


if __name__ == "__main__":
    main()
