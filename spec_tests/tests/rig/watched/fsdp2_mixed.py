"""Style of torchtitan: `fully_shard` of each block and of the root, bf16 parameters with fp32
reduction, fused-free AdamW, `clip_grad_norm_`, a learning rate from `LambdaLR`.
"""

import frame
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (
            self.wqkv(self.attention_norm(x)).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        )
        h = x + self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return h + self.w2(F.silu(self.w1(self.ffn_norm(h))))


class Transformer(nn.Module):
    def __init__(self, vocab=96, dim=24, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def batches(seed, rank, world):
    """Yield tokens and labels: every rank takes each `world`-th sample of one endless stream."""
    stream, index = torch.Generator().manual_seed(seed), 0
    buffer = []
    while True:
        start, sample = torch.randint(96, (2,), generator=stream).tolist(), index
        index += 1
        if sample % world == rank:
            buffer.append((start[0] + start[1] * torch.arange(17) ** 2) % 96)
        if len(buffer) == 4:
            batch, buffer = torch.stack(buffer), []
            yield batch[:, :-1], batch[:, 1:]


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = Transformer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 2))
    loader = batches(args.seed, rank, world)
    for step in range(args.steps):
        tokens, labels = next(loader)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.4f}")
    frame.end(rank, model)


main()
