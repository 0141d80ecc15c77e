"""The reference behind the adapters of CS336: its `fsdp` as the tests of that exercise use it.

They read gradients of `.module` by name, shards and replicas alike, and gather those of norms with
a plain `all_gather`; the layers are the exercise's own, without a bias.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import parse

WIDTH, WORDS, STEPS = 16, 20, 3


class Linear(nn.Module):
    """As the exercise has it: `[out, in]`, no bias, through einsum."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) * d_in**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """A row for each word, by indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.weight[words]


class Norm(nn.Module):
    """Computes in float32 and gives the dtype that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * wide / wide.square().mean(-1, keepdim=True).sqrt()).to(x.dtype)


def language_model() -> nn.Module:
    """Words in, scores of words out, a norm before each layer."""
    torch.manual_seed(7)
    parts = [Embedding(), Norm(), Linear(WIDTH, WIDTH), nn.ReLU(), Norm(), Linear(WIDTH, WORDS)]
    return nn.Sequential(*parts)


def trained(ctx: Context, compute_dtype: torch.dtype | None) -> list[str]:
    """Train on this rank's words; return the gradients that were not as the exercise reads them."""
    wrapped = ctx.impl.fsdp(language_model(), compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrong = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        words = torch.randint(WORDS, (2, 5), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(words)[:, -1].float(), words[:, 0]).backward()
        ctx.impl.finish_gradient_synchronization(wrapped)
        wrong += misfits(wrapped.module)
        optimizer.step()
    return wrong


def misfits(module: nn.Module) -> list[str]:
    """Gradients that do not fit their parameter, and replicated ones that differ on ranks."""
    wrong = []
    for name, parameter in module.named_parameters():
        gradient: Any = parameter.grad
        if (gradient.shape, gradient.dtype) != (parameter.data.shape, parameter.data.dtype):
            wrong.append(f"{name}: {gradient.dtype} {tuple(gradient.shape)}")
        if isinstance(module.get_submodule(name.rpartition(".")[0]), Norm):
            gathered = [torch.zeros_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, gradient)
            if not all(torch.equal(gathered[0], other) for other in gathered):
                wrong.append(f"{name}: ranks differ")
    return wrong


@pytest.mark.parametrize("compute_dtype", [None, torch.float16], ids=["float32", "float16"])
def test_gradients_fit_their_parameters_and_norms_are_replicated(
    worlds: Worlds, compute_dtype: torch.dtype | None
) -> None:
    ranks = worlds.world(2, parse("solution")).run(trained, compute_dtype)

    assert ranks == [[], []]
