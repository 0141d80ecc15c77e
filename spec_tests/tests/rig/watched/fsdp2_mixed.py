"""Style of torchtitan: `fully_shard` of each block and of the root, bf16 parameters with fp32
reduction, fused-free AdamW, `clip_grad_norm_`, a learning rate from `LambdaLR`.
"""

import frame
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


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
    model = frame.LM()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 2))
    loader = batches(args.seed, rank, world)
    for step in range(args.steps):
        tokens, labels = next(loader)
        optimizer.zero_grad()
        loss = frame.loss_of(model(tokens).float(), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = norm.full_tensor()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.4f}")
    frame.end(rank, model)


main()
