"""Style of a diffusion trainer: DDP with an own communication hook, an EMA copy made by `deepcopy`
that is updated after every step and that is evaluated; images of noise and of shapes.
"""

import copy

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Embedding(20, width)
        self.down = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, 1, 2, stride=2)
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 20))

    def forward(self, x, t):
        h = self.down(x) + self.time(t)[:, :, None, None]
        return self.up(h + self.middle(torch.relu(self.norm(h))))


def allreduce_hook(group, bucket):
    tensor = bucket.buffer().div_(group.size())
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@torch.no_grad()
def update_ema(ema, model, decay=0.9):
    for average, param in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(param, 1 - decay)
    for average, buffer in zip(ema.buffers(), model.buffers(), strict=True):
        average.copy_(buffer)


def shapes(count, generator):
    image = torch.zeros(count, 1, 8, 8)
    for i, (row, column) in enumerate(torch.randint(6, (count, 2), generator=generator)):
        image[i, 0, row : row + 3, column : column + 3] = 1.0
    return image


def diffusion_loss(model, alphas, image, generator):
    t = torch.randint(20, (len(image),), generator=generator)
    noise = torch.randn(image.shape, generator=generator)
    keep = alphas[t].view(-1, 1, 1, 1)
    return nn.functional.mse_loss(model(keep.sqrt() * image + (1 - keep).sqrt() * noise, t), noise)


def main():
    args = frame.arguments()
    rank, _ = frame.start()
    torch.manual_seed(args.seed)
    net = Denoiser()
    ema = copy.deepcopy(net).requires_grad_(False).eval()
    model = DDP(net)
    model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(args.seed * dist.get_world_size() + rank)
    held_out = shapes(8, torch.Generator().manual_seed(args.seed + 77))
    for step in range(args.steps):
        image = shapes(6, generator)
        loss = diffusion_loss(model, net.alphas, image, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, net)
        if step % 2 == 1:
            with torch.no_grad():
                fixed = torch.Generator().manual_seed(5)
                value = diffusion_loss(ema, ema.alphas, held_out, fixed)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} held out, by EMA {value.item():.4f}")
    frame.end(rank, net, ema)


main()
