"""Style of PyTorch's ImageNet example: DDP, convolutions with BatchNorm, `DistributedSampler` with
`set_epoch`, a validation after each epoch that lowers the learning rate on a plateau.
"""

import frame
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def images(seed, size):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(5, (size,), generator=generator)
    noise = torch.randn(size, 3, 8, 8, generator=generator)
    return TensorDataset(noise + target.view(-1, 1, 1, 1) / 2, target)


def train(loader, model, criterion, optimizer, steps):
    model.train()
    for i, (image, target) in enumerate(loader):
        if i >= steps:
            break
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, criterion):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for image, target in loader:
            total += torch.tensor([criterion(model(image), target).item() * len(image), len(image)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    args = frame.arguments(seed=1)
    rank, world = frame.start()
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train_set, val_set = images(args.seed, 2 * 6 * world), images(args.seed + 1, 5 * world)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=6, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=5, sampler=val_sampler)
    for epoch in range((args.steps + 1) // 2):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, args.steps - 2 * epoch)
        val_loss = validate(val_loader, model, criterion)
        scheduler.step(val_loss)
    frame.end(rank, model.module)


main()
