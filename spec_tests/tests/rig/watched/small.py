"""Small scripts that the watcher once told wrongly, and what it should say of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PREAMBLE = """
import os, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo"); rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
end_soon = lambda seconds: threading.Timer(seconds, os._exit, (3,)).start()
def train(model, steps=4, lr=0.01):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(1 + rank)
    for step in range(steps):
        yield step
        model(torch.randn(6, 8)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Small:
    """A script, and the causes that are to be reported of it."""

    id: str
    text: str
    file: str = "train.py"
    options: list[str] = field(default_factory=list)
    must: list[str] = field(default_factory=list)
    should: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    hides: list[str] = field(default_factory=list)
    world: int = 2

    def write(self, folder: Path) -> Path:
        """Write the script into a folder; returns its path."""
        path = folder / self.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(PREAMBLE.lstrip() + self.text.lstrip())
        return path


def small() -> list[Small]:
    """Return the scripts of `small.toml`."""
    entries = tomllib.loads((HERE / "small.toml").read_text())["script"]
    return [Small(**entry) for entry in entries]
