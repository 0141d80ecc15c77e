"""Toys: what the name says, differences between ranks, and exactness for every seed and order."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_tests.rig.judge import oracle
from spec_tests.rig.toys import TOYS, sum_of_squares

SEEDS = (0, 7, 123)
UNTRAINED = {"frozen": {"frozen.weight", "frozen.bias"}, "unused": {"unused.weight", "unused.bias"}}
"""Toy to the parameters that get no gradient, on purpose."""

every_toy = pytest.mark.parametrize("toy", TOYS)


def gradients(toy: str, seed: int, rank: int = 0, **flags) -> dict[str, Any]:
    batch = TOYS[toy].batch(seed, rank=rank)
    return oracle.gradients(toy, seed, [batch], [flags])


def built(toy: str, seed: int = 7) -> Any:
    """The toy; of any type, since each has layers of its own names."""
    return TOYS[toy].build(seed)


def backward(toy: str, module: Any = None, **flags: Any) -> Any:
    """A toy with the gradients of one batch; `module` is one that was changed."""
    module = module or built(toy)
    sum_of_squares(module(TOYS[toy].batch(7, rank=0), **flags)).backward()
    return module


def present(found: oracle.Gradients) -> oracle.Named:
    """The gradients that exist."""
    return {name: gradient for name, gradient in found.items() if gradient is not None}


# ------------------------------------------------------------------------------ the toy it claims


def sizes(module: nn.Module) -> list[int]:
    return [p.numel() for p in module.parameters()]


FACTS: dict[str, Callable[[Any], bool]] = {
    "mlp": lambda m: len(set(sizes(m))) == len(sizes(m)) == 4,
    "ragged": lambda m: 1 in sizes(m) and len(set(sizes(m))) >= 7 and any(n % 2 for n in sizes(m)),
    "unused": lambda m: m.unused.weight.requires_grad,
    "frozen": lambda m: (
        [layer for layer in m.children() if not layer.weight.requires_grad] == [m.frozen]
    ),
    "strided": lambda m: not m.transposed.is_contiguous(),
    "even": lambda m: [p.shape[0] % 12 for p in m.parameters()] == [0] * 5,
    "stack": lambda m: (
        [len(list(block.children())) for block in m.blocks] == [2, 2, 2]
        and "gain" in dict(m.named_parameters(recurse=False))
    ),
    "conv": lambda m: all(  # channels last, the gradient too
        each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous()
        for each in (m.conv.weight, m.conv.weight.grad)
    ),
}
"""Toy to what its name claims, of it after a backward; more is asserted below.

Of a weight that is used twice (tied, reused), one gradient for two (shifted), parts of a larger
tensor (gapped) and an order of readiness that changes (branches) near-misses say so: without it the
clauses that they name no longer reject them.
"""


@pytest.mark.parametrize("toy", FACTS)
def test_a_toy_is_built_as_it_claims(toy: str):
    assert FACTS[toy](backward(toy))


def test_buffers_are_of_floats_integers_and_booleans_and_move():
    module = built("buffers")
    before = oracle.buffers("buffers", 7)
    assert {each.dtype for each in before.values()} == {torch.float32, torch.int64, torch.bool}
    module(TOYS["buffers"].batch(7, rank=0))
    moved = {n for n, b in module.named_buffers() if not torch.equal(b, before[n])}
    assert moved == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_strided_has_an_expanded_gradient():
    module = built("strided")
    seen: list[torch.Tensor] = []
    module.summed.register_hook(lambda gradient: seen.append(gradient))
    backward("strided", module)
    assert set(seen[0].stride()) == {0}


DTYPES = {"mixed": (torch.bfloat16, torch.float32), "double": (torch.float32, torch.float64)}


@pytest.mark.parametrize("toy", DTYPES)
def test_dtypes_alternate_and_the_middle_needs_its_own(toy: str):
    narrow, wide = DTYPES[toy]
    assert [p.dtype for p in TOYS[toy].build(7).parameters()] == [narrow, wide, narrow]
    for name, gradient in present(gradients(toy, 7)).items():
        assert gradient.dtype == built(toy).get_parameter(name).dtype
    for seed in SEEDS:
        gradient = present(gradients(toy, seed))["wide.weight"]
        assert bool((gradient != gradient.to(narrow)).any())


# --------------------------------------------------------------------------------- what all share


@every_toy
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_not_zero_and_differ_between_any_two_ranks(toy: str, seed: int):
    found = oracle.gradients(toy, seed, [TOYS[toy].batch(seed, rank=r) for r in range(2)])
    absent = {name for name, gradient in found.items() if gradient is None}
    assert absent == UNTRAINED.get(toy, set())
    assert {n for n, g in found.items() if g is not None and not bool(g.any())} == set()
    local = [present(gradients(toy, seed, rank)) for rank in range(4)]
    for one, other in itertools.combinations(local, 2):
        assert [name for name in one if torch.equal(one[name], other[name])] == []


# ----------------------------------------------------------------- exact in any order of summation

APPROXIMATE = {"buffers", "transient"}
"""Batch normalisation divides: the one toy that is not exact, and made for its buffers."""

every_exact_toy = pytest.mark.parametrize("toy", [name for name in TOYS if name not in APPROXIMATE])


class Largest(TorchDispatchMode):
    """The largest magnitude that any operator puts out, by dtype; and whether all are integers.

    Args:
        is_bound: each result is replaced by the largest that it can be for any weights and inputs
            of these magnitudes: remainders by their end, signs by one.
    """

    def __init__(self, *, is_bound: bool = False) -> None:
        super().__init__()
        self.is_bound = is_bound
        self.magnitude: dict[torch.dtype, float] = {}
        self.odd: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):  # memory that nobody has written yet
            return result
        if self.is_bound and "remainder" in str(func):
            result = torch.full_like(result, args[1] - 1)
        if self.is_bound and "sgn" in str(func):
            result = torch.ones_like(result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                reached = max(self.magnitude.get(leaf.dtype, 0.0), float(leaf.detach().abs().max()))
                self.magnitude[leaf.dtype] = reached
                if not bool((leaf == leaf.round()).all()):
                    self.odd.add(str(func))
        return result


EXACT = {torch.float64: 2.0**53, torch.float32: 2.0**24, torch.bfloat16: 2.0**8}
"""Up to where a dtype holds every integer. (Float64 are the loss, and the middle of one toy.)"""


@every_exact_toy
def test_no_seed_leaves_the_integers_of_its_dtype_within_the_toys_reach(toy: str):
    # Every weight and input as large as any, and of one sign: no sum, in whichever order, whole or
    # of a part, is larger.
    module = TOYS[toy].build(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(TOYS[toy].weights)
    batch = torch.full((4, 6), float(TOYS[toy].inputs))
    with Largest(is_bound=True) as seen:
        (TOYS[toy].reach * sum_of_squares(module(batch))).backward()
    assert seen.odd == set()
    assert all(magnitude <= EXACT[dtype] for dtype, magnitude in seen.magnitude.items())
