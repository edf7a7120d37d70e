"""What both contenders of benchmarks/speech.py count in the same way: reductions, and recordings that are read."""

import json
import resource
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

import unisono
from unisono_speech.data.samples import Clip

READS = {"reads": 0, "samples": 0}


@contextmanager
def reductions():
    """Yields a dictionary that has, once the block has ended, this process's all-reduces and their megabytes."""
    made = {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        yield made
    made |= count(recorded)


def count(recorded):
    """All-reduces of floating-point numbers and of others, and the megabytes of the former."""
    seen = [event for event in recorded.events() if event.name == "gloo:all_reduce"]
    sizes = [sum(_numbers(shape) for shape in event.input_shapes) for event in seen]
    large = [size for size in sizes if size > 1000]  # gradients; the rest are counts, sums and decisions
    return {"gradient_reductions": len(large), "other_reductions": len(seen) - len(large), "numbers": sum(large)}


def _numbers(shape):
    total = 1
    for size in shape:
        total *= size if isinstance(size, int) else 1
    return total if shape else 0


class Count(unisono.Callback):
    """Writes what a run of ours took: the last update is profiled, and not among the timed ones."""

    def on_start(self, run):
        self._run, self._profile = run, None
        read = Clip.read
        READS.update(reads=0, samples=0)

        def counting(clip):
            READS["reads"] += 1
            return read(clip)

        Clip.read = counting

    def on_step(self, step, values):
        if step == self._run.steps - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profile.__enter__()
        elif self._profile is not None:
            self._profile.__exit__(None, None, None)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            made = {"memory": peak, **READS, **count(self._profile)}
            (self._run.directory / f"rank-{self._run.rank}.json").write_text(json.dumps(made))
