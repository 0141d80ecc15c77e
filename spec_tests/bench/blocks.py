"""The model of the benchmarks of wrappers: a stack of residual feed-forward blocks."""

import torch
from torch import nn

NUM_TOKENS = 64  # per micro-batch and rank
SIZES = {"1M": (128, 8), "25M": (512, 12), "124M": (1024, 14)}
"""Width and number of blocks."""


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)): the greater part of a transformer's parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


def stack(size: str) -> nn.Sequential:
    """Return the model, the same on every rank and in every arm."""
    width, num_blocks = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(num_blocks)])


def batches(size: str, rank: int, number: int = 1) -> list[torch.Tensor]:
    """Return a rank's micro-batches, each `[NUM_TOKENS, width]`."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(NUM_TOKENS, SIZES[size][0], generator=generator) for _ in range(number)]
