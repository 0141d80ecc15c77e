"""Style of nanoGPT with `compile=True`: the model is compiled, then wrapped in DDP; top-level code,
tokens of a file in which each rank reads its own part, evaluation on rank 0 by the bare model.
"""

import os

import frame
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

args = frame.arguments(seed=1337)
B, T = 4, 12
ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
tokens = frame.text()
part = tokens[len(tokens) // world * rank : len(tokens) // world * (rank + 1)]

torch.manual_seed(args.seed)
raw_model = frame.LM(dropout=0.1)
model = torch.compile(raw_model, backend="aot_eager")
if ddp:
    model = DDP(model)
torch.manual_seed(args.seed + 1 + rank)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=6e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=6e-4)
for step in range(args.steps):
    chunk = part[step * B * T : (step + 1) * B * T + 1]
    x, y = chunk[:-1].view(B, T), chunk[1:].view(B, T)
    _, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
if rank == 0:
    raw_model.eval()
    with torch.no_grad():
        print(f"last tokens: loss {raw_model(part[-B * T - 1 : -1].view(B, T), y)[1].item():.4f}")

frame.end(rank, raw_model)
