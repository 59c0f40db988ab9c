"""FastMoE's multi-node tutorial on CIFAR-10, as its users write it: only the imports differ.

    mpirun -np 2 python docs/examples/fastmoe_cifar.py --data FOLDER

Each worker holds 32 experts; a token (an image) meets two of the 64.  FOLDER holds `cifar-10-batches-py`; without it,
the figures that moeflow draws stand in.  Runs over NCCL where there are GPUs, over gloo otherwise.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from moeflow import data
from moeflow.compat.fmoe import FMoE, FMoELinear  # from fmoe import FMoE, FMoELinear
from moeflow.compat.fmoe.distributed import DistributedGroupedDataParallel  # from fmoe.distributed import ...
from moeflow.compat.fmoe.gates import GShardGate  # from fmoe.gates import GShardGate
from moeflow.schema import CifarData


class Expert(nn.Module):
    """A linear map of all experts on this worker, with an activation."""

    def __init__(self, num_expert: int, d_in: int, d_out: int):
        super().__init__()
        self.fc = FMoELinear(num_expert, d_in, d_out)

    def forward(self, inp, fwd_expert_count):
        return torch.relu(self.fc(inp, fwd_expert_count))


class MoE(FMoE):
    """The MoE layer, 16*5*5 -> 84."""

    def __init__(self, num_expert: int, d_model: int, d_out: int, world_size: int, expert_dp_comm: str):
        super().__init__(num_expert=num_expert, d_model=d_model, world_size=world_size, top_k=2, gate=GShardGate)
        self.experts = Expert(num_expert, d_model, d_out)
        self.mark_parallel_comm(expert_dp_comm)


class Net(nn.Module):
    """Two convolutions, the MoE layer, and a classifier."""

    def __init__(self, num_expert: int, world_size: int):
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.moe = MoE(num_expert, 16 * 5 * 5, 84, world_size, expert_dp_comm="world")
        self.classifier = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.classifier(self.moe(x.flatten(1)))


class Images(Dataset):
    """Images of a set by their number."""

    def __init__(self, images):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        sample = self.images.fetch(torch.tensor([index]), 0)
        return sample["inputs"][0], sample["targets"][0]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of cifar-10-batches-py")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images of one worker")
    parser.add_argument("--steps", type=int, help="of an epoch; all where not given")
    options = parser.parse_args()

    rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=world)
    device = torch.device("cuda", int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(rank)
    net = DistributedGroupedDataParallel(Net(32, world).to(device))
    source = CifarData(root=options.data) if options.data else CifarData(source="synthetic", train_samples=2048)
    train = Images(data.build(source, seed=0).train)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=options.batch, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(net(inputs.to(device)), targets.to(device))
            loss.backward()
            net.allreduce_gradients()
            optimizer.step()
            total, count = total + loss.item(), count + 1
            if count == options.steps:
                break
        if rank == 0:
            print(f"epoch {epoch}: loss {total / count:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
