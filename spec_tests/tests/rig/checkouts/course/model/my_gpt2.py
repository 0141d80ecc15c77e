"""GPT-2 as the course names its parts."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, then two layers, each around a way past it."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.n_head
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class MyGPT2LMHeadModel(nn.Module):
    """Blocks in `transformer.h`; the head is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.n_positions, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](places)
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x) @ self.transformer["wte"].weight.T
