"""Style of a HSDP example: a mesh of two dims (replicate, shard), `fully_shard` on it, a map-style
data set behind a `DistributedSampler`, SGD with momentum, `OneCycleLR`.
"""

import frame
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    args = frame.arguments()
    rank, world = frame.start()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "fsdp"))
    torch.manual_seed(args.seed)
    model = frame.LM(dropout=0.1)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=args.steps + 1)
    data = TensorDataset(frame.rows(args.seed, 36, 13))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed + 1 + rank)
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            loss = frame.loss_of(model(ids[:, :-1]), ids[:, 1:])
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
