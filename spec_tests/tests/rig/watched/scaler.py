"""Style of PyTorch's automatic mixed precision recipe: autocast, GradScaler, accumulation under
`no_sync`, `unscale_` before clipping; one image is infinite, so that all ranks skip that step.
"""

import contextlib

import frame
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ITERS_TO_ACCUMULATE = 2


def build_model():
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(36, 40), nn.LayerNorm(40), nn.ReLU()),
        *(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 4)),
    )


def get_data(seed, rank, world, batches):
    """Return this rank's batches; the last rank's third one has an infinite pixel."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batches, world, 5, 1, 6, 6, generator=generator)
    targets = torch.randint(4, (batches, world, 5), generator=generator)
    images += targets[..., None, None, None]
    if batches > ITERS_TO_ACCUMULATE:
        images[ITERS_TO_ACCUMULATE, -1, 0, 0, 3, 3] = torch.inf
    return list(zip(images[:, rank], targets[:, rank], strict=True))


def main():
    args = frame.arguments()
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    net = DDP(build_model())
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    loss_fn = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    data = get_data(args.seed, rank, world, args.steps * ITERS_TO_ACCUMULATE)
    for i, (image, target) in enumerate(data):
        update = (i + 1) % ITERS_TO_ACCUMULATE == 0
        with contextlib.nullcontext() if update else net.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(net(image), target) / ITERS_TO_ACCUMULATE
            scaler.scale(loss).backward()
        if update:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    frame.end(rank, net)


main()
