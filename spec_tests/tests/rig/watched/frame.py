"""What the scripts of this folder have in common: arguments, a process group, a small language
model and its data, and their end. A script finds it as any script finds a file beside it.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn


def arguments(seed=0):
    """Return `--steps` and `--seed`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=seed)
    return parser.parse_args()


def start():
    """Join the ranks that the launcher started, or be alone; return rank and world size."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, attn_mask=mask, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class LM(nn.Module):
    def __init__(self, vocab=128, dim=16, dropout=0.0, is_tied=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        self.layers = nn.ModuleList([Block(dim, dropout), Block(dim, dropout)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, targets=None):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else (logits, loss_of(logits, targets))


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text():
    """Return the tokens of a file that every machine has."""
    return torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)


def rows(seed, *shape):
    """Return sequences of 128 tokens, equal on all ranks."""
    return torch.randint(128, shape, generator=torch.Generator().manual_seed(seed)).cumsum(-1) % 128


def end(rank, *modules):
    """Print the hash of this rank's parameters and buffers, of shards its own, and leave."""
    digest = hashlib.sha256()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().flatten().view(torch.uint8).numpy().tobytes())
    print(f"fingerprint {rank} {digest.hexdigest()}\n", end="")
    if dist.is_initialized():
        time.sleep(0.1)  # until gloo's threads are idle: pytorch/pytorch#179291
        dist.destroy_process_group()
