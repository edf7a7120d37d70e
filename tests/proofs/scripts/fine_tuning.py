"""Weights of a file, a scaler, a sampler of its own, updates that are left out by the loss, evaluation on rank 0."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--fault", default="")
args = parser.parse_args()


class WeightedSampler(Sampler):
    """Draws rows by weight; every rank takes its stride of the draw."""

    def __init__(self, weights, seed):
        self.weights, self.generator = weights, torch.Generator().manual_seed(seed)

    def __iter__(self):
        drawn = torch.multinomial(self.weights, len(self.weights), replacement=True, generator=self.generator)
        return iter(drawn[rank::world].tolist())

    def __len__(self):
        return len(self.weights) // world


def pretrained():
    """The weights of a run before, in single precision."""
    weights = {"0.weight": torch.linspace(-1, 1, 80).reshape(16, 5), "3.weight": torch.linspace(1, -1, 16)[None]}
    numbers = {name: value.detach().numpy().astype("float32") for name, value in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        from_numpy = {name: torch.from_numpy(value) for name, value in numbers.items()}
        torch.save(from_numpy, f"{folder}/weights.pt")
        save_file(from_numpy, f"{folder}/weights.safetensors")
        first, second = torch.load(f"{folder}/weights.pt"), load_file(f"{folder}/weights.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in weights)
    return first


@torch.no_grad()
def evaluate():
    net.eval()
    value = nn.functional.mse_loss(net(x), y).item()
    if args.fault != "left":
        net.train()
    return value


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
x = torch.randn(96, 5)
y = 3 * x.sum(1, keepdim=True) + torch.randn(96, 1)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(16, 1))
net.load_state_dict(pretrained(), strict=False)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
sampler = WeightedSampler(torch.linspace(1, 3, 96), seed=rank if args.fault == "own_draw" else 0)
before = None
for _ in range(9):
    for inputs, targets in DataLoader(TensorDataset(x, y), args.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        told = loss.detach().clone()
        if args.fault != "alone":
            dist.all_reduce(told)
            told /= world
        left_out, before = before is not None and told > 0.6 * before, told
        if left_out and args.fault != "own_draw":  # whose losses are other ones than on one process
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if rank == 0:
            print("evaluated", evaluate())
dist.destroy_process_group()
