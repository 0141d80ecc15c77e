"""The whole-model shape: what `fsdp` promises beyond what it has in common with `fully_shard`.

It is the shape of the CS336 exercise. A wrapper decides by itself what is sharded, reduces after
every backward, and makes its own parameters, so it can change what an optimizer trains: a frozen
weight, a norm, a gradient that was there before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.chapters.fsdp.test_precision import HALF
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import footprint, refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=("fsdp",), level="correct", worlds=(2, 4))
holds = rows(clause, same_as_alone)
ROWS = 480
"""Of a table: two, three and four ranks divide them."""

test_frozen_in_a_whole_model = holds(
    "fsdp.backward.frozen-in-a-whole-model",
    "Frozen weights of a whole model MUST stay frozen, or be refused; the others get the mean.",
    # A Parameter made of the shard trains, whatever the weight was.
    {n: f"even not-the-{n}: backward 0" for n in ("ends", "middle")},
    source="contract: frozen; `nn.Parameter(shard)` trains",
    worlds=(2, 3),
)


class Gain(nn.Module):
    """A factor for each of four features, as a norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class PositionEmbedding(nn.Module):
    """Something to add to each of two places: no Embedding, but for its name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def deep():
    """A layer, a factor two modules below, and a table."""
    parts = (nn.Linear(4, 4), nn.Sequential(Gain()), PositionEmbedding())
    return sharded.of_integers(nn.Sequential(*parts))


def batch_of(rank):
    """Small integers of this rank."""
    return torch.arange(8.0).reshape(2, 4) + rank


RESTS = {
    "gain": sharded.toy_of("even"),
    "1.0.gain": sharded.Own(deep, batch=batch_of),
    "2.table": sharded.Own(deep, batch=batch_of),
}
"""Models, by the name of a parameter of no layer."""


def judge_rest(world, subject, name):
    """It must be plain and whole, and a step must use its mean gradient."""
    __tracebackhide__ = True
    ranks = sharded.steps_as_alone(world, subject, RESTS[name], shown=("weights",))
    is_whole = [name in rank["whole"] for rank in ranks]
    judge.equal(
        is_whole, True, quantity=f"{name!r}, which belongs to no layer, is plain and whole:"
    )


rest = rows(clause, judge_rest)

test_replicated_rest = rest(
    "fsdp.backward.replicated-rest",
    "A parameter of no Linear or Embedding MUST stay plain and whole and get the mean gradient.",
    # Sharding a norm costs more than it saves, and a loop that reads its gradient meets a DTensor.
    "gain",
    level="course",
    source="contract: rest-whole, rest-mean; "
    "CS336 assignment 2, test_fsdp_gradient_sync: norms are not sharded",
    worlds=(2, 3),
)

test_rest_of_any_depth = rest(
    "fsdp.backward.rest-of-any-depth",
    "A parameter of no layer MUST get the mean gradient however deep its module sits.",
    "1.0.gain",
    source="contract: rest-mean, rest-names; norms sit inside of blocks",
    worlds=(2,),
)

test_rest_with_a_layers_name = rest(
    "fsdp.backward.rest-with-a-layers-name",
    "A parameter of a class whose name ends in Embedding MUST stay plain, whole and averaged.",
    "2.table",
    level="production",
    source="contract: rest-whole; PositionEmbedding",
    worlds=(2,),
)

test_thawed_rest = holds(
    "fsdp.backward.thawed-rest",
    "A parameter of no layer that is thawed MUST get the mean gradient, or be refused.",
    "even not-the-first: backward 0, zero_grad none, thaw 0, backward 1",
    level="production",
    source="contract: thawed-rest; ours, once: each rank trained what had been frozen by itself",
    worlds=(2,),
)

test_accumulation_of_a_whole_model = holds(
    "fsdp.accumulation.of-a-whole-model",
    "Without `zero_grad`, gradients of a whole model MUST accumulate, or be refused with an error.",
    # Code that sets the shard's gradient where it should add trains on the last micro-batch alone.
    "even: backward 0, backward 1",
    source="contract: adds-up",
)


@clause(
    "fsdp.accumulation.no-sync-of-a-whole-model",
    level="production",
    needs=("no_sync",),
    source="contract: whole-model; FullyShardedDataParallel.no_sync",
    worlds=(2,),
)
def test_a_whole_model_sends_no_gradient_inside_no_sync(world, subject):
    """Inside `no_sync` a whole model MUST reduce nothing and lose nothing, or refuse it.

    Leaving an inner `no_sync` does not end the outer one; an exception ends one as well.
    """
    # Of what refuses the second micro-batch the first is judged as well.
    for program in ("locally 0", "nested 0 1"):
        same_as_alone(world, subject, f"even: {program}", looks=("sent",), values=False)
    same_as_alone(world, subject, "even: leave, nested 0 1, backward 2")


class Projection(nn.Linear):
    """A Linear of another name."""


def bytes_once_sharded(ctx, subject, kind):
    """Live bytes of a model of one layer, or of a list of one, once it is sharded."""
    kinds = {"Linear": nn.Linear, "subclass": Projection}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            layer = kinds[kind](16, ROWS, False) if kind in kinds else nn.Embedding(ROWS, 16)
            is_part = kind in ("table", "subclass")
            model = ctx.impl.fsdp(nn.Sequential(layer) if is_part else layer)
        del layer
        found = footprint.settled(recorder)
    assert model is not None  # alive until here
    return found


@clause(
    "fsdp.footprint.embedding-of-a-whole-model",
    level="course",
    source="contract: shards-only; "
    "CS336 assignment 2: this leaves us with the embedding layer and every linear layer",
    worlds=(3,),
)
def test_the_embedding_of_a_whole_model_is_divided(world, subject):
    """A rank MUST hold its rows of an embedding, and not those of others."""
    ranks = world.run(bytes_once_sharded, subject, "table")

    likely = "embeddings are replicated, or a shard is a view of the whole table"
    _is_divided(ranks, f"{ROWS} rows of 64 bytes over {world.size} ranks", likely)


@clause(
    "fsdp.footprint.layer-as-the-whole-model",
    source="contract: root-layer, shards-only; `named_children` of a layer is empty",
    worlds=(3,),
)
@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
def test_a_whole_model_that_is_one_layer_is_divided(world, subject, kind):
    """Where the whole model is one Linear or Embedding, it MUST be sharded, or be refused."""
    usual = (bytes_once_sharded, subject, "table")
    ranks = refusal.answer_or_refusal(world, bytes_once_sharded, subject, kind, ordinary=usual)

    if ranks is not None:
        likely = "children are looked through and not the model, or a shard is a view of the whole"
        _is_divided(ranks, f"{kind} of {ROWS} rows of 64 bytes over {world.size} ranks", likely)


@clause(
    "fsdp.footprint.subclass-in-a-whole-model",
    level="production",
    source="contract: subclasses",
    worlds=(3,),
)
def test_a_subclass_of_linear_is_divided(world, subject):
    """A layer whose class is made from Linear MUST be sharded as a Linear is."""
    ranks = world.run(bytes_once_sharded, subject, "subclass")

    likely = "layers are known by their class itself, or by its name"
    _is_divided(ranks, f"a subclass of Linear of {ROWS} rows of 64 bytes", likely)


def _is_divided(ranks, given, likely):
    """Rows of a third, and no more than gradients of as many that are there from the start."""
    __tracebackhide__ = True
    whole = ROWS * 16 * 4
    rows = whole // len(ranks)
    footprint.at_most(
        ranks,
        {"rows of this rank": rows, "their gradients": rows, "slack of a fifth": whole // 5},
        quantity="bytes after sharding",
        likely=likely,
        given=given,
    )


@clause(
    "fsdp.traffic.step-of-a-whole-model",
    level="production",
    source="contract: step-gathers, step-reduces; "
    "Rajbhandari et al. 2020, section 7.2.2: three copies; CS336 assignment 2",
    worlds=(2, 3),
)
def test_a_step_of_a_whole_model_sends_three_copies(world, subject):
    """A whole model's step MUST gather weights twice at most and reduce once, in their dtypes."""
    logs = world.run(sharded.second_step, subject, "even")

    whole, weights = sharded.numel("even"), sharded.numel("even") - sharded.numel("even", "gain")
    copies = [sum(e.bytes for e in log.collectives(*traffic.GATHERS)) / 4 / weights for log in logs]
    judge.holds(
        max(copies) <= 2,
        f"expected at most two copies of {weights} weights to be gathered, got {copies}",
        likely="weights are gathered more often than forward and backward need, or wider",
    )
    traffic.reduced_once(logs, numel=whole, num_bytes=4 * whole, bookkeeping=64)


def gathered_bytes(ctx, subject):
    """Bytes per weight that forward and backward gather, by dtype."""
    torch.manual_seed(sharded.SEED)
    layers = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)).to(ctx.device)
    num_weights = sum(p.numel() for p in layers.parameters())
    model = ctx.impl.fsdp(layers, compute_dtype=HALF)
    with ctx.recording() as recorder:
        loss = model(torch.arange(4, device=ctx.device)).square().sum()
    logs = [recorder.log()]
    with ctx.recording() as recorder:
        loss.backward()
        sharded.finish(ctx, subject, model)
    reduced = sum(e.numel for e in recorder.log().collectives(*traffic.REDUCTIONS))
    if reduced >= num_weights:  # else gradients are gathered as well, and summed by hand
        logs.append(recorder.log())
    found: dict[str, float] = {}
    for event in traffic.together(*logs).collectives(*traffic.GATHERS):
        word = "+".join(event.dtypes)
        found[word] = found.get(word, 0.0) + event.bytes / num_weights
    return found


@clause(
    "fsdp.precision.gathers-in-its-dtype",
    level="course",
    source="contract: gathers; "
    "CS336 assignment 2: cast the weights to that dtype before communicating",
    worlds=(2,),
)
def test_a_whole_model_gathers_its_weights_in_the_dtype_that_computes(world, subject):
    """With `compute_dtype`, a whole model MUST gather its weights in that dtype.

    Cast after the gather, they cost twice the traffic, and every number is right. How often they
    are gathered, and when, is not looked at, except where they travel as raw bytes.
    """
    for rank, sizes in enumerate(world.run(gathered_bytes, subject)):
        judge.holds(
            sum(sizes.values()) >= 1,  # a rank may receive the others' shares alone
            f"rank {rank}: expected at least 1 byte gathered for each weight, got {sizes}",
            likely="the weights are not sharded",
        )
        wide = sum(size for word, size in sizes.items() if "float32" in word or "float64" in word)
        judge.holds(
            wide < 1 and sizes.get("uint8", 0) <= 2 * 2,  # for forward and for backward
            f"rank {rank}: expected weights gathered in bfloat16, got bytes for each weight of "
            f"{sizes}",
            likely="all weights, or some, are gathered in float32, in the forward or the backward",
        )
