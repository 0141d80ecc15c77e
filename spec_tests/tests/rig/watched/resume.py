"""Style of fault-tolerant training with DDP: rank 0 saves a checkpoint, the process group is
destroyed, a new one is built, and every rank loads the checkpoint and goes on where it was.
"""

import os
import tempfile
from pathlib import Path

import frame
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, args, snapshot):
        self.snapshot, self.args, self.step = snapshot, args, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        net = frame.LM(is_tied=True)
        if snapshot.exists():
            state = torch.load(snapshot, map_location="cpu", weights_only=True)
            net.load_state_dict(state["model"])
            self.step = state["step"]
        self.model = DDP(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if snapshot.exists():
            self.optimizer.load_state_dict(state["optimizer"])
        data = TensorDataset(frame.rows(args.seed, 15 * self.world, 12))
        self.sampler = DistributedSampler(data, seed=args.seed)
        self.loader = DataLoader(data, batch_size=5, sampler=self.sampler)

    def save(self):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "step": self.step}
            state["optimizer"] = self.optimizer.state_dict()
            torch.save(state, self.snapshot)
        dist.barrier()

    def batches(self):
        """Yield the batches of all epochs, without those that were trained on before."""
        epoch = self.step // len(self.loader)
        skip = self.step % len(self.loader)
        while True:
            self.sampler.set_epoch(epoch)
            for i, (batch,) in enumerate(self.loader):
                if i >= skip:
                    yield batch
            epoch, skip = epoch + 1, 0

    def train(self, until):
        batches = self.batches()
        while self.step < until:
            batch = next(batches)
            loss = frame.loss_of(self.model(batch[:, :-1]), batch[:, 1:])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1


def setup(attempt):
    """Build a process group; torchrun's store lives on, so that each one has keys of its own."""
    store, rank, world = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, world = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def main():
    args = frame.arguments()
    setup(0)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    snapshot = Path(folder[0]) / "snapshot.pt"
    trainer = Trainer(args, snapshot)
    trainer.train(args.steps // 2)
    trainer.save()
    dist.destroy_process_group()
    setup(1)
    trainer = Trainer(args, snapshot)
    trainer.train(args.steps)
    dist.barrier()
    if trainer.rank == 0:
        snapshot.unlink()
        snapshot.parent.rmdir()
    frame.end(trainer.rank, trainer.model)


main()
