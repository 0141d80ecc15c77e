"""Style of nanoGPT with `compile=True`: the model is compiled, then wrapped in DDP; top-level code,
tokens of a file in which each rank reads its own part, evaluation on rank 0 by the bare model.
"""

import argparse
import os
from pathlib import Path

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

args = frame.arguments(seed=1337)
B, T, dim, vocab = 4, 12, 16, 128


class MLPLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(T, dim)
        self.attn = nn.Linear(dim, 3 * dim, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 32), nn.Linear(32, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        q, k, v = self.attn(self.norm1(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + F.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))), 0.1, self.training)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.reshape(-1))


ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
tokens = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=vocab - 1)
part = tokens[len(tokens) // world * rank : len(tokens) // world * (rank + 1)]

torch.manual_seed(args.seed)
raw_model = MLPLM()
model = torch.compile(raw_model, backend="aot_eager")
if ddp:
    model = DDP(model)
torch.manual_seed(args.seed + 1 + rank)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=6e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=6e-4)
for step in range(args.steps):
    rows = part[step * B * T : (step + 1) * B * T + 1]
    x, y = rows[:-1].view(B, T), rows[1:].view(B, T)
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
