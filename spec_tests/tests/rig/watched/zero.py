"""Style of PyTorch's ZeRO tutorial: DDP with `ZeroRedundancyOptimizer`, accumulation under
`no_sync`, tokens read in order as in build-nanogpt's `DataLoaderLite`.
"""

import contextlib

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

B, T, ACCUMULATE = 4, 12, 2


class DataLoaderLite:
    def __init__(self, process_rank, num_processes):
        self.process_rank, self.num_processes = process_rank, num_processes
        self.tokens = frame.text()
        self.current_position = B * T * self.process_rank

    def next_batch(self):
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        self.current_position += B * T * self.num_processes
        if self.current_position + B * T * self.num_processes + 1 > len(self.tokens):
            self.current_position = B * T * self.process_rank
        return buf[:-1].view(B, T), buf[1:].view(B, T)


def main():
    args = frame.arguments(seed=42)
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = DDP(frame.LM())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    loader = DataLoaderLite(rank, world)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_accum = torch.zeros(())
        for micro in range(ACCUMULATE):
            x, y = loader.next_batch()
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = frame.loss_of(model(x), y) / ACCUMULATE
                loss.backward()
            loss_accum += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss_accum)
        if rank == 0:
            print(f"step {step} loss {loss_accum.item() / world:.4f} norm {norm.item():.4f}")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        print(f"{len(optimizer.state_dict()['state'])} states gathered on rank 0")
    frame.end(rank, model.module)


main()
