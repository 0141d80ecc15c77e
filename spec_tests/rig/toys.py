"""Toy models, each made to bring out one situation, with integer weights and inputs.

Everything is exact, in float32 but for the two toys about dtypes: weights and inputs are small
integers, activations are `abs`, and the loss is a sum of squares, so every intermediate value and
every gradient is an integer, and no sum of them over samples, micro-batches and ranks reaches
2**24. (Not float64, in which that would be easy: right code may keep float32 weights whatever it
is given.) With the loss multiplied by the world size even the mean over ranks is an integer. Order
of summation and place of division then cannot matter, and every right implementation is bit-equal
to one process with the whole batch, at any world size. `Toy.reach` says up to how many summands.

What a toy's name says is itself asserted, in `tests/rig/test_toys.py` or by near-misses that need
it: a famous fixture called "tied weights" tied nothing, and every test passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn


class Mlp(nn.Module):
    """Two layers, weights and biases of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).abs())


class Ragged(nn.Module):
    """Many parameters of odd sizes, one of a single element: flat offsets have no regularity."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, 1, 7, 3, 5, 2]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, around = x, x.sum(dim=-1, keepdim=True)  # past the layer that has a single output
        for layer in self.layers:
            # A remainder keeps five layers of integers within the exact range and, unlike a clamp,
            # lets every gradient through: one that is zero everywhere would hide that it was lost.
            h = layer(h).remainder(4.0) + around
        return h * self.gain


class Tied(nn.Module):
    """One weight used by two layers under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.middle(self.encode(x)).abs())


class Reused(nn.Module):
    """One module applied twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(x).abs()).abs())


class Frozen(nn.Module):
    """A frozen layer between two that train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 4).requires_grad_(False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x).abs()).abs())


class Branches(nn.Module):
    """Independent branches; `use` says which are computed, and in which order.

    The order of evaluation decides the order in which gradients become ready. Each branch has a
    factor of its own: with equal ones their gradients would be equal, and mixing them up unseen.
    """

    factors: ClassVar[dict[str, int]] = {"a": 1, "b": 2, "c": 3}

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 4)
        # Two alike, so that they can be mixed up in silence, and one of other sizes.
        self.branch = nn.ModuleDict({n: nn.Linear(4, 3, bias=n != "c") for n in self.factors})

    def forward(self, x: torch.Tensor, use: str = "abc") -> torch.Tensor:
        h = self.shared(x).abs()
        parts = [self.factors[name] * self.branch[name](h) for name in use]
        return torch.stack(parts).sum(dim=0)


class Unused(nn.Module):
    """A trainable layer that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Buffers(nn.Module):
    """Batch normalisation, plus buffers of integers and booleans."""

    counts: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        # No bias: normalisation takes it away again. And without the factor below, the gradient of
        # the normalisation's own bias would not depend on the data: equal on all ranks.
        self.linear = nn.Linear(6, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * x[:, :4]


class Transient(Buffers):
    """A buffer that is in no state dict, such as a table of rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3), persistent=False)


class Convolution(nn.Module):
    """A convolution whose weight, and so its gradient, is in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, kernel_size=2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in stubs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.repeat(1, 2).reshape(-1, 3, 2, 2)
        return self.conv(images.contiguous(memory_format=torch.channels_last)).flatten(1)


class Strided(nn.Module):
    """A transposed parameter, left out where `use` says so, and one with an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(6, 4).T)
        self.summed = nn.Parameter(torch.empty(6, 3))

    def forward(self, x: torch.Tensor, use: str = "ts") -> torch.Tensor:
        return (x @ self.transposed.T if "t" in use else x) + self.summed.sum()


class Gapped(nn.Module):
    """A parameter that is a part of a larger tensor: between its rows lie foreign elements.

    On the CPU: a move to another device closes the gaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.neighbour = nn.Linear(6, 4)
        self.columns = nn.ParameterList([torch.empty(4, 9)[:, :6]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.columns[0].T + 2 * self.neighbour(x)


class Shifted(nn.Module):
    """A parameter in the shape of what it is added to: autograd gives both one gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.shift = nn.Parameter(torch.empty(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.shift


class Viewed(nn.Module):
    """Parameters that are added as views: autograd takes views of one gradient as theirs.

    With two of them, a second backward adds to the memory of both, so that the sums are wrong.
    """

    def __init__(self, number: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.shifts = nn.ParameterList(torch.empty(24) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        for shift in self.shifts:
            y = y + shift.view(4, 6)
        return y


class Mixed(nn.Module):
    """Parameters of a narrow, a wide and a narrow dtype; each just holds the gradients of its own.

    Whichever end a bucket begins at, it begins with the narrow one, and what that makes of the
    middle layer's gradients shows: they are a large number of inputs' offsets and a small rest.
    """

    def __init__(
        self,
        narrow: torch.dtype = torch.bfloat16,
        wide: torch.dtype = torch.float32,
        offset: int = 2**12,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.dtypes = narrow, wide  # a wrapper may put layers of its own in these places
        # Few elements, so that a small bucket holds an end and the middle.
        self.narrow_in = nn.Linear(6, 3, bias=False, dtype=narrow)
        self.wide = nn.Linear(6, 3, bias=False, dtype=wide)
        self.narrow_out = nn.Linear(6, 3, bias=False, dtype=narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow, wide = (x.to(dtype) for dtype in self.dtypes)
        first = self.narrow_in(narrow).remainder(2.0)
        # Side by side, and remainders: the integers of bfloat16 end at 256. Others have room for
        # layers of which one follows the other: only then does a backward need weights.
        if narrow.dtype != torch.bfloat16:
            wide = wide + torch.cat([first, first], dim=-1)
        parts = [first, self.wide(wide + self.offset), self.narrow_out(narrow)]
        return torch.cat([part.remainder(2.0).to(x.dtype) for part in parts], dim=-1)


class Even(nn.Module):
    """An embedding, layers and a parameter of the model's own, all of twelve rows.

    Two, three and four ranks get equal shares.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 12, bias=False)
        self.gain = nn.Parameter(torch.empty(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first column says which row: an embedding takes no gradient through its input.
        h = self.embed(x[:, 0].abs().long()) + x
        return self.down(self.up(h).abs()) * self.gain


class Block(nn.Module):
    """Two layers and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 2)
        self.down = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A remainder keeps the integers small and lets every gradient through.
        return x + self.down(self.up(x).abs()).remainder(2.0)


class Stack(nn.Module):
    """An embedding, blocks of several layers each, a head, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.empty(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first column says which row: an embedding takes no gradient through its input.
        h = self.embed(x[:, 0].abs().long()) + x
        for block in self.blocks:
            h = block(h)
        return self.head(h * self.gain).remainder(6.0)


class Reordered(nn.Module):
    """Layers that run in another order than they were registered in, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.third = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.third, self.first, self.second, self.first):
            x = layer(x).remainder(3.0)
        return self.head(x).remainder(6.0)


class Ladder(nn.Module):
    """Layers in a row; `use` says which of them a forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({n: nn.Linear(6, 6, bias=False) for n in "abcd"})

    def forward(self, x: torch.Tensor, use: str = "abcd") -> torch.Tensor:
        for name in use:
            x = self.layers[name](x).remainder(3.0)
        return x


class Narrow(nn.Module):
    """Layers in a row and one beside them, whose gradients float16 and bfloat16 hold exactly.

    They are integers of at most 32 times what all of them are multiples of, and remainders of three
    change where a weight turns its sign.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 2)
        self.beside = nn.Linear(6, 3, bias=False)
        self.shift = nn.Parameter(torch.empty(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).remainder(3.0)
        y = (self.second(h) + self.shift).remainder(3.0)
        return torch.cat([y, self.beside(x).remainder(3.0)], dim=-1)


@dataclass(frozen=True)
class Toy:
    """A toy by name: how to build it and how far its values reach.

    Attributes:
        model: the class.
        weights: largest absolute weight.
        inputs: largest absolute input.
        reach: how many summands stay exact for any seed: micro-batches, times the ranks that add
            up theirs, times the ranks again since the loss is multiplied by their number.
    """

    name: str
    model: Callable[[], nn.Module]
    weights: int = 1
    inputs: int = 2
    reach: int = 4 * 4 * 5

    def build(self, seed: int) -> nn.Module:
        """A fresh model; equal seeds give equal weights, buffers included."""
        module = self.model()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.copy_(integers(tensor, self.weights, generator))
        return module

    def batch(self, seed: int, *, rank: int, micro: int = 0, samples: int = 4) -> torch.Tensor:
        """Inputs `[samples, 6]` that belong to one rank and micro-batch and to no other."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1_009 * rank + micro + 1)
        like = torch.empty(samples, 6)
        return integers(like, self.inputs, generator)


def integers(like: torch.Tensor, largest: int, generator: torch.Generator) -> torch.Tensor:
    """Non-zero integers, as far as the dtype can tell: a zero would hide a missing term.

    Those of int64 lie beyond what float64 can hold.
    """
    if like.dtype == torch.int64:
        return torch.randint(2**53, 2**62, like.shape, generator=generator)
    size = torch.randint(1, largest + 1, like.shape, generator=generator)
    sign = torch.randint(0, 2, like.shape, generator=generator) * 2 - 1
    if like.dtype == torch.bool:
        return sign > 0
    return (size * sign if like.dtype.is_floating_point else size).to(like.dtype)


def sum_of_squares(output: torch.Tensor) -> torch.Tensor:
    """The loss of all toys; multiply it by the world size to keep the mean over ranks exact.

    The sum itself is float64: of squares it would leave float32's integers first. The gradient
    that it sends into a model has the dtype of the output.
    """
    return output.double().square().sum()


def with_smallest_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy whose gradient is the negative number that is closest to zero."""
    copied = 1.0 * parameter
    copied.register_hook(lambda g: torch.nextafter(torch.zeros_like(g), -torch.ones_like(g)))
    return copied


TOYS = {
    toy.name: toy
    for toy in (
        Toy("mlp", Mlp, weights=2, inputs=3),
        Toy("ragged", Ragged),
        Toy("tied", Tied, reach=3 * 3 * 2),
        Toy("reused", Reused, reach=3 * 3 * 2),
        Toy("frozen", Frozen),
        Toy("branches", Branches),
        Toy("unused", Unused, weights=2, inputs=3),
        Toy("buffers", Buffers, weights=2, inputs=3),
        Toy("transient", Transient, weights=2, inputs=3),
        Toy("conv", Convolution, weights=2, inputs=3),
        Toy("strided", Strided, weights=2, inputs=3),
        Toy("gapped", Gapped, weights=2, inputs=3),
        Toy("shifted", Shifted, weights=2, inputs=3),
        Toy("viewed", Viewed, weights=2, inputs=3),
        Toy("twins", partial(Viewed, 2), weights=2, inputs=3),
        Toy("mixed", Mixed, reach=4 * 4),
        Toy("double", partial(Mixed, torch.float32, torch.float64, 2**30), reach=4 * 4),
        Toy("even", Even, reach=4 * 4 * 2),
        Toy("stack", Stack, reach=4 * 4 * 2),
        Toy("reordered", Reordered, reach=3 * 3),
        Toy("ladder", Ladder, reach=3 * 3),
        Toy("narrow", Narrow),
    )
}
