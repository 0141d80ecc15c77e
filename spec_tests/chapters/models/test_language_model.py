"""A language model: ids in, logits out, and each logit from what came before it.

A mask that is off by one lets a place see its own answer. The loss then falls below anything that
text allows, and the samples are noise. Nothing but the contract's five numbers is asked of a model:
its inside is its own.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=("language_model",), level="course", worlds=(1,))
VOCABULARY, LONGEST = 13, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 2,
    "embedding_dim": 8,
    "max_sequence_length": LONGEST,
}
# Two right orders of summation differ by a few roundings per layer; batches may be computed so.
# Norms, rotations and attention are in float32 in many models, whatever the weights are in.
SAME = rounding(torch.float32, terms=8 * SIZES["embedding_dim"], depth=8)


def build(ctx):
    """The model in float64, in evaluation mode, its weights large enough to matter."""
    torch.manual_seed(5)
    model = ctx.impl.language_model(**SIZES).double().eval().to(ctx.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def some_ids(rows, length, seed=3):
    """Ids [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def logits(ctx, *batches):
    """The logits of each of these ids, without gradients."""
    model = build(ctx)
    with torch.no_grad():
        return [model(ids.to(ctx.device)) for ids in batches]


@clause("models.logits.shape", source="contract: shape")
def test_ids_become_logits_over_the_vocabulary(world, subject):
    """Ids [batch, seq] MUST become logits [batch, seq, vocab], up to max_sequence_length."""
    sizes = ((1, 1), (3, 5), (2, LONGEST))
    [found] = world.run(logits, *(some_ids(*size) for size in sizes))

    for size, seen in zip(sizes, found, strict=True):
        judge.equal(
            [(tuple(seen.shape), seen.is_floating_point())],
            ((*size, VOCABULARY), True),
            quantity="shape of the logits, and whether they are floating-point:",
            given=f"ids of shape {size}",
        )


def around_a_change(world, place):
    """Logits before and after the id at `place` is another one."""
    ids = some_ids(2, LONGEST)
    changed = ids.clone()
    changed[:, place] = (changed[:, place] + 1) % VOCABULARY
    return world.run(logits, ids, changed)[0]


@clause("models.logits.causal", source="contract: causal; Vaswani et al. 2017, section 3.1")
@pytest.mark.parametrize("place", [1, 4, 7])
def test_a_token_alters_no_logit_before_it(world, subject, place):
    """Changing the token at a place MUST alter no logit before it."""
    before, after = around_a_change(world, place)

    judge.tensors(
        [{"logits": after[:, :place]}],
        {"logits": before[:, :place]},
        quantity="logits from before the token was changed",
        within=SAME,
        given=f"the token at place {place} changed, logits at places 0 to {place - 1}",
    )


@clause("models.logits.see-the-past", source="contract: sees-past")
@pytest.mark.parametrize("place", [0, 3])
def test_a_token_alters_the_logits_from_there_on(world, subject, place):
    """Changing the token at a place MUST alter the logits there and at every later place."""
    before, after = around_a_change(world, place)

    gap = (after - before).abs().amax(dim=-1).amin(dim=0)
    blind = [n for n in range(place, LONGEST) if float(gap[n]) <= SAME.bound(before)]
    judge.holds(
        not blind,
        f"rank 0: the logits at places {blind} do not depend on the token at {place}",
        likely="the mask hides more than the future, or attention does nothing",
    )


@clause(
    "models.logits.rows-are-independent",
    level="correct",
    source="contract: rows-apart; "
    "a batch is a convenience: accumulation and data parallelism rest on it",
)
def test_a_row_does_not_see_its_neighbours(world, subject):
    """The logits of a sequence MUST NOT depend on the other sequences of its batch.

    Otherwise cutting a batch into micro-batches or ranks changes what is trained.
    """
    ids = some_ids(3, 6)
    [(alone, company)] = world.run(logits, ids[:1], ids)

    judge.tensors(
        [{"logits": company[:1]}],
        {"logits": alone},
        quantity="logits of the sequence by itself",
        within=SAME,
        given="a sequence beside two others",
    )


@clause(
    "models.logits.see-the-order",
    level="correct",
    source="contract: sees-order; "
    "Vaswani et al. 2017, section 3.5: attention alone does not see it",
)
def test_the_order_of_earlier_tokens_matters(world, subject):
    """The logits MUST depend on the order of earlier tokens, not only on which they are.

    The causal mask alone gives a little of it from the second layer on, so the first three of five
    tokens are exchanged, and what is asked is a difference beyond rounding.
    """
    [[found]] = world.run(logits, torch.tensor([[1, 2, 3, 4, 5], [3, 1, 2, 4, 5]]))

    last = found[:, -1]
    gap = float((last[0] - last[1]).abs().max())
    judge.holds(
        gap > SAME.bound(last),
        f"rank 0: the order 1 2 3 and the order 3 1 2 give the same logits (difference {gap:.1e})",
        likely="positions are not encoded",
    )


def trained_once(ctx):
    """By trainable parameter, whether a backward pass leaves it a finite gradient."""
    model = build(ctx).train()
    ids = some_ids(4, LONGEST).to(ctx.device)
    found = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {
        name: "none" if p.grad is None else "finite" if p.grad.isfinite().all() else "not finite"
        for name, p in model.named_parameters()
        if p.requires_grad
    }


@clause(
    "models.gradients.reach-every-parameter",
    level="production",
    source="contract: gradients; "
    "DistributedDataParallel: a parameter without a gradient is an error by default",
)
def test_every_parameter_gets_a_finite_gradient(world, subject):
    """One loss over all places MUST give every trainable parameter a finite gradient."""
    [found] = world.run(trained_once)

    wrong = {name: what for name, what in found.items() if what != "finite"}
    judge.holds(not wrong, f"rank 0: gradients that are missing or not finite: {wrong}")
    judge.holds(bool(found), "rank 0: the model has no trainable parameter")


@clause(
    "models.refusal.too-long",
    level="production",
    source="an index error on the CPU and a device assert, which ends the process, on CUDA",
)
def test_a_sequence_that_is_too_long_is_refused(world, subject):
    """A sequence beyond max_sequence_length SHOULD be a ValueError that names both numbers."""
    errors = world.run(refusal.raised, logits, some_ids(1, LONGEST + 1))

    refusal.of_kinds(errors, "ValueError")
    text = errors[0]["text"]
    is_told = str(LONGEST) in text and str(LONGEST + 1) in text
    judge.holds(is_told, f"expected {LONGEST} and {LONGEST + 1} in {text!r}")
