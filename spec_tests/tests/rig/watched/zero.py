"""Style of PyTorch's ZeRO tutorial: DDP with `ZeroRedundancyOptimizer`, accumulation under
`no_sync`, tokens read in order as in build-nanogpt's `DataLoaderLite`.
"""

import contextlib
from pathlib import Path

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
        self.tokens = torch.tensor(list(Path(contextlib.__file__).read_bytes())).clamp(max=127)
        self.current_position = B * T * self.process_rank

    def next_batch(self):
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        self.current_position += B * T * self.num_processes
        if self.current_position + B * T * self.num_processes + 1 > len(self.tokens):
            self.current_position = B * T * self.process_rank
        return buf[:-1].view(B, T), buf[1:].view(B, T)


class MLPMixerLM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.emb = nn.Embedding(128, dim)
        self.norm = nn.LayerNorm(T * dim)
        self.fc1 = nn.Linear(T * dim, 24)
        self.fc2 = nn.Linear(24, dim)
        self.head = nn.Linear(dim, 128)

    def forward(self, ids):
        past = self.emb(ids)
        seen = torch.stack([past.roll(shift, 1) for shift in range(T)], dim=2)
        seen = seen * torch.ones(T, T).tril().flip(1).tril().unsqueeze(-1)
        return self.head(past + self.fc2(torch.relu(self.fc1(self.norm(seen.flatten(2))))))


def main():
    args = frame.arguments(seed=42)
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = DDP(MLPMixerLM())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    loader = DataLoaderLite(rank, world)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_accum = torch.zeros(())
        for micro in range(ACCUMULATE):
            x, y = loader.next_batch()
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(x)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / ACCUMULATE
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
