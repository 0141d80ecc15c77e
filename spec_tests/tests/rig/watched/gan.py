"""Style of PyTorch's DCGAN example under DDP: two models, two optimizers; the discriminator's
gradients of the generator's loss are left behind and cleared before its own backward.
"""

import os

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

opt = frame.arguments(seed=999)
nz, ngf, ndf, batch = 8, 8, 8, 6


def weights_init(m):
    if isinstance(m, (nn.ConvTranspose2d, nn.Conv2d)):
        nn.init.normal_(m.weight, 0.0, 0.1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            *(nn.ConvTranspose2d(nz, ngf, 4, 1, 0), nn.GroupNorm(2, ngf), nn.ReLU()),
            *(nn.ConvTranspose2d(ngf, 1, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(1, ndf, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.1)),
            *(nn.Conv2d(ndf, 1, 4, 1, 0), nn.Flatten(0)),
        )

    def forward(self, image):
        return self.main(image)


distributed = "RANK" in os.environ
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
torch.manual_seed(opt.seed)
netG, netD = Generator().apply(weights_init), Discriminator().apply(weights_init)
if distributed:
    netG, netD = DDP(netG), DDP(netD)
torch.manual_seed(opt.seed + 1 + rank)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
ones, zeros = torch.ones(batch), torch.zeros(batch)
for i in range(opt.steps):
    # Update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    slope = torch.linspace(-1, 1, 8).view(1, 1, 1, 8) * torch.randn(batch, 1, 1, 1).sign()
    real = slope + 0.1 * torch.randn(batch, 1, 8, 8)
    noise = torch.randn(batch, nz, 1, 1)
    fake = netG(noise)
    both = netD(torch.cat([real, fake.detach()]))
    errD = criterion(both, torch.cat([ones, zeros]))
    errD.backward()
    optimizerD.step()
    # Update G: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), ones)
    errG.backward()
    optimizerG.step()
    if rank == 0:
        print(f"[{i}/{opt.steps}] loss D {errD.item():.4f} loss G {errG.item():.4f}")

frame.end(rank, netG, netD)
