"""Objects shared by the parts of a torch engine: job, device, transfer, reduction, random state, observers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from unisono.engines.observers import Observers
from unisono.engines.protocol import EngineJob
from unisono.engines.spike_detection import SpikeDetection
from unisono.engines.torch.devices import select_device
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.numerics.recurrent_state import RecurrentState
from unisono.engines.torch.profiler import TorchProfiler
from unisono.engines.torch.transfer import Transfer


@dataclass
class EngineParts:
    """The shared objects of one process, which are independent of each other."""

    job: EngineJob
    device: torch.device
    comparison: CollectiveComparison
    profiler: TorchProfiler
    random_state: RandomState
    recurrent: RecurrentState
    reduction: MetricReduction
    spikes: SpikeDetection
    transfer: Transfer
    observers: Observers = field(default_factory=Observers)

    @classmethod
    def from_job(cls, job: EngineJob) -> EngineParts:
        """The parts for a job."""
        config, process = job.config, job.process
        device = select_device(config.layout.device, process)
        profiler = TorchProfiler(device)
        return cls(
            job=job,
            device=device,
            comparison=CollectiveComparison(
                process, config.launch.timeout, config.launch.desync, ddp=config.layout.strategy == "ddp"
            ),
            profiler=profiler,
            random_state=RandomState(config.run.seed, device),
            recurrent=RecurrentState(job, device),
            reduction=MetricReduction(process.world_size, device),
            spikes=SpikeDetection(config.optim.skip_spikes),
            transfer=Transfer(device, config.train.precision, profiler.part),
        )
