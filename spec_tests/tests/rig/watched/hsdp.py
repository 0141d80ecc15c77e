"""Style of a HSDP example: a mesh of two dims (replicate, shard), `fully_shard` on it, a map-style
data set behind a `DistributedSampler`, SGD with momentum, `OneCycleLR`.
"""

import frame
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    def __init__(self, seed, size=36):
        self.rows = torch.randint(50, (size, 13), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index, :-1], self.rows[index, 1:]


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=2)
        self.feed = nn.Sequential(
            nn.Linear(dim, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, dim)
        )

    def forward(self, x):
        mixed = self.mix(self.norm(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.feed(mixed)


class ConvLM(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.layers = nn.Sequential(Layer(dim), Layer(dim))
        self.head = nn.Linear(dim, 50, bias=False)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def main():
    args = frame.arguments()
    rank, world = frame.start()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "fsdp"))
    torch.manual_seed(args.seed)
    model = ConvLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=args.steps + 1)
    data = Sequences(args.seed)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed + 1 + rank)
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if (step := step + 1) >= args.steps:
                break
        epoch += 1
    frame.end(rank, model)


main()
