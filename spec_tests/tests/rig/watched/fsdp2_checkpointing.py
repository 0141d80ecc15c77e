"""Style of a Hugging Face trainer on FSDP2: keyword inputs, labels with -100, a loss over the
tokens of the window, activation checkpointing, accumulation by `set_requires_gradient_sync`.
"""

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

LENGTH, ACCUMULATE = 12, 2


class LM(frame.LM):
    def forward(self, input_ids, labels=None, num_items=None):
        logits = super().forward(input_ids)
        flat, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(flat, wanted, ignore_index=-100, reduction="sum")
        return {"loss": total / num_items, "logits": logits}


def collate(generator):
    """Return a padded batch of four texts whose lengths differ."""
    input_ids = torch.randint(1, 128, (4, LENGTH), generator=generator).sort(dim=1).values
    lengths = torch.randint(4, LENGTH + 1, (4, 1), generator=generator)
    padding = torch.arange(LENGTH) >= lengths
    return {
        "input_ids": input_ids.masked_fill(padding, 0),
        "labels": input_ids.masked_fill(padding, -100),
    }


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = LM(dropout=0.1, is_tied=True)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer, preserve_rng_state=True))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = torch.Generator().manual_seed(1000 * args.seed + rank)
    torch.manual_seed(args.seed + 100 + rank)
    model.train()
    for step in range(args.steps):
        window = [collate(data) for _ in range(ACCUMULATE)]
        num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        dist.all_reduce(num_items)
        for micro, batch in enumerate(window):
            last = micro == ACCUMULATE - 1
            model.set_requires_gradient_sync(last)
            loss = model(**batch, num_items=num_items)["loss"] * world
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} tokens {num_items.item()} loss of the last {loss.item():.4f}")
    frame.end(rank, model)


main()
