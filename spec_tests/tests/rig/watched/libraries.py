"""Style of Accelerate's examples: the library wraps model, optimizer and loader. Says so and ends
where it is not installed.
"""

import importlib.util
import sys

import frame
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


def main():
    args = frame.arguments()
    if not importlib.util.find_spec("accelerate"):
        print("Accelerate is not installed")
        sys.exit(0)
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
    accelerator.print(f"last loss {loss.item():.4f}")
    frame.end(accelerator.process_index, accelerator.unwrap_model(model))


main()
