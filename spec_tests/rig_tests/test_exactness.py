"""Toys compute exactly: whatever the seed, and in whichever order ranks and samples add up."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_tests.rig import oracle
from spec_tests.rig.toys import TOYS, sum_of_squares
from spec_tests.rig_tests.test_toys import SEEDS, gradients, present

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


def within_reach(seen: Largest) -> bool:
    return all(magnitude <= EXACT[dtype] for dtype, magnitude in seen.magnitude.items())


@every_exact_toy
@pytest.mark.parametrize("seed", SEEDS)
def test_every_value_is_an_integer_that_its_dtype_holds(toy: str, seed: int):
    module = TOYS[toy].build(seed)
    micros = max(1, TOYS[toy].reach // 16)
    batches = [TOYS[toy].batch(seed, rank=r, micro=m) for r in range(4) for m in range(micros)]
    with Largest() as seen:
        for batch in batches[: TOYS[toy].reach // 4]:
            (4 * sum_of_squares(module(batch))).backward()
    assert seen.odd == set()
    assert within_reach(seen)


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
    assert within_reach(seen)


@every_exact_toy
@pytest.mark.parametrize("seed", SEEDS)
def test_float32_gives_the_bits_of_float64(toy: str, seed: int):
    narrow, wide = TOYS[toy].build(seed), TOYS[toy].build(seed).double()
    vars(wide)["dtypes"] = (torch.float64, torch.float64)  # of the toys that cast their inputs
    for rank in range(3):
        batch = TOYS[toy].batch(seed, rank=rank)
        output, exact = narrow(batch), wide(batch.double())
        assert torch.equal(output.double(), exact)
        (3 * sum_of_squares(output)).backward()
        (3 * sum_of_squares(exact)).backward()
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        found, right = one.grad, other.grad
        assert (found is None) == (right is None)
        assert found is None or right is None or torch.equal(found.double(), right)


@every_exact_toy
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_is_equal_bits_in_any_order_and_wherever_one_divides(toy: str, size: int):
    seed = 7
    batches = [TOYS[toy].batch(seed, rank=rank) for rank in range(size)]
    expected = present(oracle.gradients(toy, seed, batches))
    local = [present(oracle.gradients(toy, seed, [batch])) for batch in batches]
    for order in itertools.permutations(range(size)):
        for name, mean in expected.items():
            scaled = torch.stack([local[rank][name] * size for rank in order])
            total, divided_first = torch.zeros_like(mean), torch.zeros_like(mean)
            for part in scaled:
                total = total + part
                divided_first = divided_first + part / size
            assert torch.equal(total / size, mean)
            assert torch.equal(divided_first, mean), "the factor makes the division exact"


@every_exact_toy
@pytest.mark.parametrize("rate", [1.0, 2.0**-16])
def test_a_step_by_a_power_of_two_stays_exact(toy: str, rate: float):
    trained = oracle.trained(toy, 7, [[TOYS[toy].batch(7, rank=0)]], lr=rate)
    start = oracle.parameters(toy, 7)
    for name, step in present(gradients(toy, 7)).items():
        if rate == 1.0 or step.dtype != torch.bfloat16:
            assert torch.equal((start[name] - trained[name]) / rate, step)
