"""What the parts of a torch engine share: the job, the device, and what moves, sums, draws and observes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.engines.observers import Observers
from unisono.engines.protocol import Job
from unisono.engines.spike_detection import SpikeDetection
from unisono.engines.torch.devices import device_of
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.numerics.metric_reduction import Reduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.numerics.recurrent_state import RecurrentState
from unisono.engines.torch.profiler import Profiler
from unisono.engines.torch.transfer import Transfer


@dataclass
class Parts:
    """Those of one process; they know nothing of each other."""

    job: Job
    device: torch.device
    comparison: CollectiveComparison
    profiler: Profiler
    random_state: RandomState
    recurrent: RecurrentState
    reduction: Reduction
    spikes: SpikeDetection
    transfer: Transfer
    observers: Observers = field(default_factory=Observers)

    @classmethod
    def of(cls, job: Job) -> Parts:
        """The parts for a job."""
        config, process = job.config, job.process
        device = device_of(config.layout.device, process)
        profiler = Profiler(device)
        return cls(
            job=job,
            device=device,
            comparison=CollectiveComparison(
                process, config.launch.timeout, config.launch.desync, ddp=config.layout.strategy == "ddp"
            ),
            profiler=profiler,
            random_state=RandomState(config.run.seed, device),
            recurrent=RecurrentState(job, device),
            reduction=Reduction(process.world_size, device),
            spikes=SpikeDetection(config.optim.skip_spikes),
            transfer=Transfer(device, config.train.precision, profiler.part),
        )
