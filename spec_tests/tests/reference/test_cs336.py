"""The reference behind the adapters of CS336: its `fsdp` as the tests of that exercise use it.

They read gradients of `.module` by name; the layers are the exercise's own, without a bias. That
parameters of other layers stay whole is judged by the clause `fsdp.backward.replicated-rest`.
"""

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.tests.reference.launch import on_ranks

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


@pytest.mark.parametrize("compute_dtype", [None, torch.float16], ids=["float32", "float16"])
@on_ranks(2)
def test_the_exercises_own_layers_are_sharded_and_gradients_fit_their_parameters(
    ctx, compute_dtype
):
    torch.manual_seed(7)
    layers = (Embedding(), Linear(WIDTH, WIDTH), nn.ReLU(), Linear(WIDTH, WORDS))
    wrapped = ctx.impl.fsdp(nn.Sequential(*layers), compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        words = torch.randint(WORDS, (2, 5), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(wrapped(words)[:, -1].float(), words[:, 0]).backward()
        ctx.impl.finish_gradient_synchronization(wrapped)
        for name, parameter in wrapped.module.named_parameters():
            gradient: Any = parameter.grad
            assert gradient.shape == parameter.data.shape, name
            assert gradient.dtype == parameter.data.dtype, name
        assert wrapped.module[0].weight.to_local().numel() < WORDS * WIDTH
        optimizer.step()
