"""The whole-model shape: what `fsdp` promises beyond what it has in common with `fully_shard`.

It is the shape of the CS336 exercise. A wrapper decides by itself what is sharded, reduces after
every backward, and makes its own parameters, so it can change what an optimizer trains: a frozen
weight, a norm, a gradient that was there before.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import Sharded
from spec_tests.fsdp.test_precision import HALF, constant, embedding
from spec_tests.laws import equivalence, footprint, refusal, traffic
from spec_tests.rig import judge, oracle
from spec_tests.rig.symptoms import Hint

clause = clauses(judges=("fsdp",), level="correct", worlds=(2, 4))
ROWS = 480
"""Of a table: two, three and four ranks divide them."""


def frozen_before(ctx, subject, seed, frozen):
    """Gradients of a whole model of which those parameters were frozen before it was sharded."""
    sharded = Sharded(ctx, subject, "even", seed, frozen=frozen)
    sharded.backward()
    return sharded.stepped()


@clause(
    "fsdp.backward.frozen-in-a-whole-model",
    source="contract: what is frozen stays frozen, or is refused; `nn.Parameter(shard)` trains",
    worlds=(2, 3),
)
@pytest.mark.parametrize(
    "frozen", [("embed.weight",), ("down.weight", "gain")], ids=["first", "last"]
)
def test_frozen_weights_of_a_whole_model_stay_frozen(world, subject, frozen):
    """Frozen weights of a whole model MUST stay frozen, or be refused; the others get the mean.

    A Parameter made of the shard trains, whatever the weight was.
    """
    ranks = refusal.answer_or_refusal(world, frozen_before, subject, 7, frozen)

    if ranks is not None:
        expected = equivalence.full_batch_gradients("even", 7, ranks=range(world.size))
        trained = Hint(
            "frozen weights are trained: Parameters made anew require gradients", expected
        )
        built = oracle.parameters("even", 7)
        judge.tensors(
            ranks,
            expected | {name: torch.zeros_like(built[name]) for name in frozen},
            quantity="mean gradient",
            hints=[trained],
            given=f"frozen {frozen}",
        )


def rest_of_a_whole_model(ctx, subject, seed):
    """The parameter that belongs to no layer, and its gradient after a backward."""
    sharded = Sharded(ctx, subject, "even", seed)
    sharded.backward()
    named: dict[str, Any] = dict(sharded.model.named_parameters())
    found = [p for name, p in named.items() if name.rpartition(".")[2] == "gain"]
    if len(found) != 1 or isinstance(found[0], DTensor):
        return {"kind": type(found[0]).__name__ if found else f"none, only {[*named]}"}
    return {
        "kind": "plain",
        "parameter": {"gain": found[0].detach().clone()},
        "gradient": {"gain": found[0].grad},
    }


@clause(
    "fsdp.backward.replicated-rest",
    level="course",
    source="CS336 assignment 2, test_fsdp_gradient_sync: norms are not sharded",
    worlds=(2, 3),
)
def test_what_is_no_layer_stays_whole_and_gets_the_mean_gradient(world, subject):
    """A parameter of no Linear or Embedding MUST stay plain and whole and get the mean gradient.

    Sharding a norm costs more than it saves, and a loop that reads its gradient meets a DTensor.
    """
    ranks = world.run(rest_of_a_whole_model, subject, 7)

    judge.equal(
        [rank["kind"] for rank in ranks],
        "plain",
        quantity="kind of 'gain', which belongs to no Linear or Embedding",
    )
    built = oracle.parameters("even", 7)
    judge.tensors(
        [rank["parameter"] for rank in ranks],
        {"gain": built["gain"]},
        quantity="parameter as built",
    )
    means = equivalence.full_batch_gradients("even", 7, ranks=range(world.size))
    own = [equivalence.full_batch_gradients("even", 7, ranks=[r]) for r in range(world.size)]
    local = [equivalence.scaled(gradients, world.size) for gradients in own]
    judge.tensors(
        [rank["gradient"] for rank in ranks],
        {"gain": means["gain"]},
        quantity="mean gradient",
        hints=[Hint("the rank's own local gradient: it was never reduced", local)],
    )


def finished_each(ctx, subject, toy, seed):
    """Gradients of two micro-batches, each reduced, without zero_grad in between."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.backward(0)
    sharded.backward(1)
    return sharded.stepped()


@clause(
    "fsdp.accumulation.of-a-whole-model",
    source="contract: gradients add up until zero_grad, or a second backward is an error",
)
def test_gradients_of_a_whole_model_add_up_until_they_are_cleared(world, subject):
    """Without `zero_grad`, gradients of a whole model MUST accumulate, or be refused with an error.

    Code that sets the shard's gradient where it ought to add trains on the last micro-batch alone.
    """
    ranks = refusal.answer_or_refusal(world, finished_each, subject, "even", 7)

    if ranks is not None:
        equivalence.mean_gradients(
            ranks, "even", 7, micros=(0, 1), absent_is_zero=True, given="two backwards, each ended"
        )


def finished_once(ctx, subject, toy, seed):
    """Gradients of two micro-batches whose backwards are followed by one finish."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.loss(0).backward()
    sharded.loss(1).backward()
    sharded.finish()
    return sharded.stepped()


@clause(
    "fsdp.accumulation.one-finish",
    source="contract: several backwards may come before one finish; gradient accumulation",
)
def test_two_backwards_of_a_whole_model_and_one_finish_add_up(world, subject):
    """Two backwards of a whole model and one finish MUST give the mean of both, or be an error."""
    ranks = refusal.answer_or_refusal(world, finished_once, subject, "even", 7)

    if ranks is not None:
        equivalence.mean_gradients(
            ranks, "even", 7, micros=(0, 1), absent_is_zero=True, given="two backwards, one finish"
        )


def finished_twice(ctx, subject, seed):
    """Gradients of one backward, finished twice."""
    sharded = Sharded(ctx, subject, "even", seed)
    sharded.backward()
    sharded.finish()
    return sharded.stepped()


@clause("fsdp.backward.finish-is-idempotent", source="contract: a second call changes nothing")
def test_a_second_finish_of_a_whole_model_changes_nothing(world, subject):
    """A second `finish_gradient_synchronization` MUST NOT change what the next update uses."""
    ranks = world.run(finished_twice, subject, 7)

    once = equivalence.full_batch_gradients("even", 7, ranks=range(world.size))
    again = Hint("divided by the world size once more", equivalence.scaled(once, 1 / world.size))
    equivalence.mean_gradients(
        ranks, "even", 7, hints=[again], absent_is_zero=True, given="finish called twice"
    )


def table(ctx, subject):
    """Live bytes of a model that is little more than a table of words, once it is sharded."""
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model = ctx.impl.fsdp(nn.Sequential(nn.Embedding(ROWS, 16)))
        gc.collect()
        found = recorder.live_bytes
    assert model is not None  # alive until here
    return found


@clause(
    "fsdp.footprint.embedding-of-a-whole-model",
    level="course",
    source="CS336 assignment 2: this leaves us with the embedding layer and every linear layer",
)
def test_the_embedding_of_a_whole_model_is_divided(world, subject):
    """A rank MUST hold its rows of an embedding, and not those of others."""
    ranks = world.run(table, subject)

    rows = ROWS * 16 * 4 // world.size
    footprint.at_most(
        ranks,
        {"rows of this rank": rows, "slack of a fifth of the table": ROWS * 16 * 4 // 5},
        quantity="bytes after sharding",
        likely="embeddings are replicated: Linear layers alone are sharded",
        given=f"{ROWS} rows of 64 bytes over {world.size} ranks",
    )


def single_layer(ctx, subject, kind):
    """Live bytes of a whole model that is one layer, once it is sharded."""
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            layer = nn.Embedding(ROWS, 16) if kind == "Embedding" else nn.Linear(16, ROWS, False)
            model = ctx.impl.fsdp(layer)
        del layer
        gc.collect()
        found = recorder.live_bytes
    assert model is not None  # alive until here
    return found


@clause(
    "fsdp.footprint.layer-as-the-whole-model",
    source="contract: shards Linear and Embedding weights; `named_children` of a layer is empty",
    worlds=(2,),
)
@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
def test_a_whole_model_that_is_one_layer_is_divided(world, subject, kind):
    """Where the whole model is one Linear or Embedding, it MUST be sharded, or be refused."""
    ranks = refusal.answer_or_refusal(world, single_layer, subject, kind, ordinary=(table, subject))

    if ranks is not None:
        whole = ROWS * 16 * 4
        footprint.at_most(
            ranks,
            {"rows of this rank": whole // world.size, "slack of a fifth": whole // 5},
            quantity="bytes after sharding",
            likely="the model's children are looked through, and not the model itself",
            given=f"{kind} of {ROWS} rows of 64 bytes over {world.size} ranks",
        )


def gathered_dtypes(ctx, subject):
    """Dtypes of the floating-point numbers that are gathered in forward."""
    layers = nn.Sequential(embedding(), constant(1.0)).to(ctx.device)
    model = ctx.impl.fsdp(layers, compute_dtype=HALF)
    with ctx.recording() as recorder:
        model(torch.arange(4, device=ctx.device))
    sent = recorder.log().collectives(*traffic.GATHERS)
    return sorted({dtype for event in sent for dtype in event.dtypes if "float" in dtype})


@clause(
    "fsdp.precision.gathers-in-its-dtype",
    level="course",
    source="CS336 assignment 2: cast the weights to that dtype before communicating",
    worlds=(2,),
)
def test_a_whole_model_gathers_its_weights_in_the_dtype_that_computes(world, subject):
    """With `compute_dtype`, a whole model's forward MUST gather its weights in that dtype.

    Cast after the gather, they cost twice the traffic, and every number is right. The backward of
    an embedding needs no weights: what is gathered there is not looked at.
    """
    ranks = world.run(gathered_dtypes, subject)

    judge.equal(ranks, ["bfloat16"], quantity="dtypes of what is gathered")
