"""Objects shared by the parts of a torch engine: job, device, transfer, reduction, random state, observers."""

from __future__ import annotations

from unisono.engines.observers import Observers
from unisono.engines.protocol import EngineJob
from unisono.engines.spike_detection import SpikeDetection
from unisono.engines.torch.devices import limit_memory, select_device
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.engines.torch.numerics.recurrent_state import RecurrentState
from unisono.engines.torch.profiler import TorchProfiler
from unisono.engines.torch.transfer import Transfer


class EngineParts:
    """The shared objects of one process, which are independent of each other."""

    def __init__(self, job: EngineJob) -> None:
        config, process = job.config, job.process
        self.job = job
        self.device = device = select_device(config.layout.device, process)
        limit_memory(config.layout, device)
        self.comparison = CollectiveComparison(
            process, config.launch.timeout, config.launch.desync, ddp=config.layout.strategy == "ddp"
        )
        self.profiler = TorchProfiler(device)
        self.random_state = RandomState(config.run.seed, device)
        self.recurrent = RecurrentState(job, device)
        self.reduction = MetricReduction(process.world_size, device)
        self.spikes = SpikeDetection(config.optim.skip_spikes)
        self.transfer = Transfer(device, config.train.precision, self.profiler.part)
        self.observers = Observers()
