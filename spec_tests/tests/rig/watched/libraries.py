"""Style of Accelerate's examples, or of Lightning Fabric's where Accelerate is not installed: the
library wraps model, optimizer and loader. Says so and ends where neither is installed.
"""

import argparse
import hashlib
import importlib.util
import os
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
    inputs = torch.randn(480, 12)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader


def with_accelerate(args):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build(args.seed)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(args.seed + 1 + accelerator.process_index)
    done = 0
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                done += 1
            optimizer.step()
            optimizer.zero_grad()
        if done == args.steps:
            break
    accelerator.print(f"accelerate: last loss {loss.item():.4f}")
    return accelerator.process_index, accelerator.unwrap_model(model), accelerator.end_training


def with_fabric(args):
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    )
    fabric.launch()
    model, optimizer, loader = build(args.seed)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    torch.manual_seed(args.seed + 1 + fabric.global_rank)
    for _, (inputs, targets) in zip(range(args.steps), loader, strict=False):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.print(f"fabric: last loss {loss.item():.4f}")
    return fabric.global_rank, model.module, torch.distributed.destroy_process_group


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", choices=["accelerate", "lightning"])
    args = parser.parse_args()
    styles = {"accelerate": with_accelerate, "lightning": with_fabric}
    names = [args.library] if args.library else list(styles)
    found = [name for name in names if importlib.util.find_spec(name)]
    if not found:
        print("neither Accelerate nor Lightning is installed")
        sys.exit(0)
    rank, model, end = styles[found[0]](args)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"fingerprint {rank} {digest.hexdigest()}\n", end="")
    end()


if __name__ == "__main__":
    main()
