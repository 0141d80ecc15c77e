"""Small language models, each with its memory in another place, and what a training step takes.

What is right is observed on a real step, from the allocator's own record: neither a formula nor a
tracker of tensors is the judge of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.programs.laws import footprint

ESTIMATE = ("memory_estimate",)
TERMS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "peak_bytes")


class Stack(nn.Module):
    """Embedding, layers of tanh(Linear), head: ids [batch, seq] -> logits [batch, seq, words]."""

    def __init__(self, words: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.head(x.to(self.head.weight.dtype))


class Checkpointed(Stack):
    """The same function; all layers are computed again in the backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(checkpoint(self.through, self.embedding(ids), use_reentrant=False))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Case:
    """A model and the batch that goes through it."""

    words: int
    width: int
    num_layers: int
    batch_size: int
    sequence_length: int
    kind: type[Stack] = Stack
    ties: bool = False
    frozen_layers: int = 0
    narrow_layers: int = 0
    dtype: torch.dtype = torch.float32

    def build(self, device: torch.device | str) -> Stack:
        """The model, in training mode."""
        with torch.device(device):
            model = self.kind(self.words, self.width, self.num_layers).to(self.dtype)
        if self.ties:
            model.head.weight = model.embedding.weight
        for layer in model.layers[: self.frozen_layers]:
            layer.requires_grad_(False)
        model.layers[: self.narrow_layers].to(torch.bfloat16)
        return model

    @property
    def sizes(self) -> dict[str, int]:
        """As `memory_estimate` takes them."""
        return {"batch_size": self.batch_size, "sequence_length": self.sequence_length}


CASES = {
    # Nearly everything is logits: the highest moment is the backward of the loss.
    "wide": Case(1024, 16, 1, batch_size=8, sequence_length=32),
    # Nearly everything is what layers keep.
    "deep": Case(8, 64, 8, batch_size=8, sequence_length=64),
    # Nearly everything is parameters: the highest moment is the update.
    "heavy": Case(8, 128, 8, batch_size=1, sequence_length=2),
    "checkpointed": Case(8, 64, 8, batch_size=8, sequence_length=64, kind=Checkpointed),
    "tied": Case(512, 32, 2, batch_size=2, sequence_length=8, ties=True),
    "frozen": Case(8, 128, 8, batch_size=1, sequence_length=2, frozen_layers=6),
    "bfloat16": Case(64, 32, 3, batch_size=2, sequence_length=8, dtype=torch.bfloat16),
    "two-dtypes": Case(64, 32, 3, batch_size=2, sequence_length=8, narrow_layers=2),
}


def static_bytes(case: Case) -> dict[str, int]:
    """Parameters, gradients and moments, added up from the tensors."""
    model = case.build("meta")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {
        "parameter_bytes": sum(p.nbytes for p in model.parameters()),
        "gradient_bytes": trained,
        "optimizer_bytes": 2 * trained,
        "num_trained": sum(p.requires_grad for p in model.parameters()),
    }


def estimated(ctx: Any, *names: str, scale: int = 1) -> list[dict[str, int]]:
    """The implementation's estimates, one after another; `scale` multiplies the batches."""
    found = []
    for name in names:
        case = CASES[name]
        said = ctx.impl.memory_estimate(
            case.build(ctx.device),
            batch_size=scale * case.batch_size,
            sequence_length=case.sequence_length,
        )
        found.append({term: said[term] for term in TERMS})
    return found


def beside_the_truth(ctx: Any, name: str) -> dict[str, dict[str, int]]:
    """The estimate, and what a real step took."""
    [said] = estimated(ctx, name)
    return {"said": said, "took": took(ctx, CASES[name])}


def took(ctx: Any, case: Case) -> dict[str, int]:
    """Activations and peak of a real step, the third."""
    model = case.build(ctx.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.zeros(case.batch_size, case.sequence_length, dtype=torch.int64, device=ctx.device)

    def forward() -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    _, activations = footprint.peak_bytes(ctx.device, forward)
    above, _ = footprint.peak_bytes(ctx.device, step)
    moments = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    rest = sum(t.nbytes for t in (*model.parameters(), *moments))
    return {"activation_bytes": activations, "peak_bytes": rest + above}
