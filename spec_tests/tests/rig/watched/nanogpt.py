"""Style of nanoGPT's train.py: top-level code, DDP, gradient accumulation by setting
`require_backward_grad_sync`, random offsets with a seed per rank, cosine learning rate, clipping.
"""

import argparse
import math
import os
from pathlib import Path

import frame
import torch
import torch.nn as nn
from torch.distributed import init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

config = frame.arguments(seed=1337)
batch_size, block_size, n_embd, n_head, n_layer, dropout = 3, 16, 16, 2, 2, 0.1
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 2, 1.0
eval_interval = 2
gradient_accumulation_steps = 6

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_rank, ddp_world_size, seed_offset = 0, 1, 0
master_process = ddp_rank == 0
torch.manual_seed(config.seed + seed_offset)

text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
data = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 32), nn.GELU(), nn.Linear(32, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(b, t, 3, n_head, c // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.drop(self.c_proj(y))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, 128, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, 128), targets.view(-1))

    def configure_optimizers(self, weight_decay):
        params = [p for p in self.parameters() if p.requires_grad]
        decay = [p for p in params if p.dim() >= 2]
        nodecay = [p for p in params if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}]
        groups.append({"params": nodecay, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / max(1, config.steps - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.tensor([model(*get_batch("val"))[1].item() for _ in range(2)])
    model.train()
    return losses.mean()


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers(weight_decay=0.1)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

X, Y = get_batch("train")
for iter_num in range(config.steps):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, lr {lr:.2e}")

frame.end(ddp_rank, raw_model)
