"""Style of nanoGPT's train.py: top-level code, DDP, gradient accumulation by setting
`require_backward_grad_sync`, random offsets with a seed per rank, cosine learning rate, clipping.
"""

import math
import os

import frame
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

config = frame.arguments(seed=1337)
batch_size, block_size = 3, 16
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

text = frame.text()
data = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


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


model = frame.LM(dropout=0.1, is_tied=True)
scaler = torch.amp.GradScaler("cpu", enabled=False)
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
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
