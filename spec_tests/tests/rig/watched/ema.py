"""Style of a trainer with moving averages: DDP with an own communication hook, an EMA copy made by
`deepcopy` that is updated after every step and that is evaluated.
"""

import copy

import frame
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def allreduce_hook(group, bucket):
    tensor = bucket.buffer().div_(group.size())
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@torch.no_grad()
def update_ema(ema, model, decay=0.9):
    for average, param in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(param, 1 - decay)


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    net = frame.LM()
    ema = copy.deepcopy(net).requires_grad_(False).eval()
    model = DDP(net)
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = frame.rows(args.seed, args.steps + 1, world, 6, 12)
    held_out = rows[0, 0]
    for step, batch in enumerate(rows[1:, rank]):
        loss = frame.loss_of(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, net)
        if step % 2 == 1:
            with torch.no_grad():
                value = frame.loss_of(ema(held_out[:, :-1]), held_out[:, 1:])
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} held out, by EMA {value.item():.4f}")
    frame.end(rank, net, ema)


main()
