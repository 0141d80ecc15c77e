"""Style of FSDP2 with `reshard_after_forward=False` (ZeRO-2): an evaluation under `no_grad` between
the training steps, after the optimizer's step and before the next forward.
"""

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 36), nn.GELU(), nn.Linear(36, dim)
        )

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.ln(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class LM(nn.Module):
    def __init__(self, vocab=70, dim=18):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def lm_loss(model, batch):
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    total = sum(lm_loss(model, batch) for batch in batches)
    model.train()
    dist.all_reduce(total)
    return total.item() / len(batches) / dist.get_world_size()


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = LM()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randint(70, (args.steps + 2, world, 3, 15), generator=generator).cumsum(-1) % 70
    held_out, rows = rows[:2, rank], rows[2:, rank]
    for step, batch in enumerate(rows):
        optimizer.zero_grad()
        if step % 2 == 0:
            value = evaluate(model, held_out)
            if rank == 0:
                print(f"step {step} held-out loss {value:.4f}")
        loss = lm_loss(model, batch)
        loss.backward()
        optimizer.step()
    frame.end(rank, model)


main()
