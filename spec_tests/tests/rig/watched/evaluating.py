"""Style of FSDP2 with `reshard_after_forward=False` (ZeRO-2): an evaluation under `no_grad` between
the training steps, after the optimizer's step and before the next forward.
"""

import frame
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def lm_loss(model, batch):
    return frame.loss_of(model(batch[:, :-1]), batch[:, 1:])


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
    model = frame.LM()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = frame.rows(args.seed, args.steps + 2, world, 3, 15)
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
