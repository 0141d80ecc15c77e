"""What attention is judged on, and what a failure says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.problem import (
    FITS,
    GRADIENTS,
    RAGGED,
    WHOLE_TILES,
    Problem,
    inputs,
    narrow,
    reference,
)
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import Violation
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig import helpers
from spec_tests.tests.rig.helpers import CHECKOUTS, judged

SIZES = {
    "attention.shapes.ragged-lengths",
    "attention.shapes.lengths-of-the-forward",
    "attention.shapes.head-dims",
    "attention.shapes.one-of-each",
}
TILED_ONLY = "impostor:attention.whole-tiles-only"
CHECKOUT = f"cs336:{CHECKOUTS / 'cs336_2026'}"


def cases_of(clause: Clause) -> list[dict[str, Any]]:
    return [case for case in clause.cases() if case["subject"] == bodies.TILED[0]]


BITS = {"attention.forward.float32-products", "attention.gradients.float32-range"}


@pytest.mark.parametrize(
    ("words", "wanted", "chosen"),
    [
        (TILED_ONLY, SIZES, ""),
        ("impostor:attention.half-products", BITS, ("attention.forward", "attention.gr")),
    ],
    ids=["whole tiles", "eleven bits"],
)
def test_one_fault_fails_the_clauses_about_it_alone(
    worlds: Worlds, words: str, wanted: set[str], chosen
):
    of_tiled = [c for c in helpers.clauses("attention", "correct") if bodies.TILED[0] in c.judges]
    asked = [c for c in of_tiled if c.id.startswith(chosen)]
    found = [judged(impls.parse(words), worlds, c, case) for c in asked for case in cases_of(c)]
    failed = [r for r in found if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)]
    assert {r.clause.id for r in failed} == wanted, [r.message for r in failed]


@pytest.mark.parametrize(
    ("words", "id", "said"),
    [
        (TILED_ONLY, "attention.shapes.ragged-lengths", "given: Problem(seq_q=17, seq_k=130"),
        (CHECKOUT, "attention.forward.lse", "(whole tiles: other sizes fail or are refused"),
    ],
    ids=["raised", "fitted"],
)
def test_a_failure_says_on_which_sizes(worlds: Worlds, words: str, id: str, said: str):
    clause = helpers.clause_named(id)
    failed = [judged(impls.parse(words), worlds, clause, case) for case in cases_of(clause)]
    assert said in "".join(r.message for r in failed if r.outcome is Outcome.FAILED)


# ------------------------------------------------------------------------------------ in the parent


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("lengths", [(70, 90), (90, 70), (70, 70), (1, 77), (64, 65), (300, 333)])
def test_fitted_sizes_are_what_they_say(fit: str, lengths: tuple[int, int]):
    problem = Problem(seq_q=lengths[0], seq_k=lengths[1], head_dim=24).fitted(fit)
    q, k = problem.seq_q, problem.num_keys
    if "whole tiles" in fit:
        assert q % WHOLE_TILES == k % WHOLE_TILES == 0
        assert all(n & (n - 1) == 0 for n in (q, k, problem.head_dim))
    if "equal lengths" in fit:
        assert q == k
    else:
        assert (q > k, q < k) == (lengths[0] > lengths[1], lengths[0] < lengths[1])
    assert fit in repr(problem)


def test_all_that_is_wrong_is_reported():
    right = {name: value.float() for name, value in reference(RAGGED).items()}
    seen = {**right, "O": 2 * right["O"], "dK": -right["dK"], "dV": torch.zeros(1)}
    with pytest.raises(Violation) as caught:
        rules.close(seen, RAGGED, names=("O", "L", "dQ", "dK", "dV"))
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines if "expected " in line and line[:7] != "largest"] == [
        "O",
        "dK",
        "dV:",
    ]
    assert "likely: twice what it should be" in lines
    (of_dk,) = [line for line in lines if line.startswith("dK")]
    assert "the sign is wrong, largest error" in of_dk


def test_rows_are_told_apart_only_where_the_others_are_right():
    """Rows that exceed a bound by chance, of many that are off alike, are nothing in particular."""
    problem = RAGGED.but(dtype="float16")
    right = reference(problem)["dQ"]
    generator = torch.Generator().manual_seed(7)
    factors = 1 + 0.02 * torch.rand(right.shape[:-1], generator=generator).unsqueeze(-1)
    for seen, said in (
        (factors * right, "each row is off by a factor of its own"),
        (right + 0.02 * torch.rand(right.shape, generator=generator), ""),
        (right.index_fill(-2, torch.tensor([3]), 0.5), "rows [3] are wrong, the others right"),
    ):
        with pytest.raises(Violation) as caught:
            rules.close({"dQ": seen.half()}, problem, names=("dQ",))
        likely = [line for line in str(caught.value).splitlines() if line[:8] == "likely: "]
        assert [line.startswith(f"likely: {said}") for line in likely] == [True] * bool(said)


@pytest.mark.parametrize("tile", [16, 64, 0])
def test_narrow_sums_are_named_where_their_error_is_seen(tile: int):
    problem = RAGGED.but(dtype="bfloat16", seq_k=1024)
    right = reference(problem)["O"]
    # The last has an error of the same size, from elsewhere.
    seen = narrow(problem, tile) if tile else right + (narrow(problem, 16) - right).flip(-1)
    ((_, looks_like, _),) = rules.faults({"O": seen.bfloat16()}, problem, names=["O"], tf32=False)
    assert looks_like.startswith("scores, maxima or sums are rounded to bfloat16") == bool(tile)
    wide = RAGGED.but(dtype="float64")
    seen = reference(wide)["O"].float().double()
    ((_, looks_like, _),) = rules.faults({"O": seen}, wide, names=["O"], tf32=False)
    assert looks_like.startswith("scores, maxima or sums are rounded to float32")


def test_keys_that_fill_up_a_tile_and_count_are_named():
    problem = RAGGED.but(seq_k=90)
    x, right = inputs(problem), reference(problem)
    zeros = torch.zeros_like(x.k[..., :38, :])  # up to 128
    keys, values = (torch.cat([each, zeros], dim=-2).double() for each in (x.k, x.v))
    seen = (x.q.double() @ keys.mT * problem.factor).softmax(dim=-1) @ values
    for found, said in ((seen, True), (1.1 * right["O"], False)):
        ((_, looks_like, _),) = rules.faults({"O": found.float()}, problem, names=["O"], tf32=False)
        assert looks_like.startswith("keys that are padding enter the softmax") == said


def test_gradients_of_pytorchs_own_kernel_are_within_the_rules():
    """Where few keys are seen they exceed one rounding in norm, for 5 of 200 draws."""
    worst = 0.0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(1, 1, 70, 24, generator=generator).bfloat16() for _ in range(4)]
        found = [_gradients(*drawn), _gradients(*(each.double() for each in drawn))]
        for name, seen, ref in zip(GRADIENTS, *found, strict=True):
            of_norm, *_ = rules.bounds(name, seen, ref, seen)
            worst = max(worst, of_norm.error / of_norm.allowed)
    assert worst <= 1


def _gradients(*drawn: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of causal attention, by q, k and v; the last of `drawn` is the gradient of the output."""
    q, k, v = (each.clone().requires_grad_() for each in drawn[:3])
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(output, (q, k, v), drawn[3])
