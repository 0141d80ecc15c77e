"""Traffic and memory: one copy of the parameters per step, and 1/W of the state.

That is the bargain of ZeRO-1: with an all-reduce of the gradients before it a step sends little
more than data parallelism does, and keeps a fraction. Level `production`: counts and bytes are
PyTorch's offer, not the exercises' demand. See Rajbhandari et al. 2020, section 7.

Large worlds: a step on many ranks sends what it does on two; state is one part in so many.
"""

from __future__ import annotations

from torch import nn

from spec_tests.chapters.zero1.runs import (
    DEPTH,
    OPTIMIZERS,
    TOY,
    WIDTH,
    state_bytes,
    step_on_ones,
    steps,
    wide,
)
from spec_tests.programs.laws import agreement, footprint, large_worlds, traffic
from spec_tests.programs.stepped import Divided
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.pretended import pretended

clause = clauses(needs=("sharded_optimizer",), level="production", worlds=(2, 3))
VOLUME = "Rajbhandari et al. 2020, section 7; ZeroRedundancyOptimizer, one broadcast per parameter"
LAYER = (WIDTH + 1) * WIDTH
# Beginnings on cache lines, lengths that W divides: less than 64 bytes for each parameter.
PADDING = 2 * 16


def third_step(ctx, scene):
    """What the third step of a toy sends. The first two may still be settling."""
    stepped = Divided(ctx, scene)
    stepped.follow(f"{steps(1, 2)}, deal 3 all")
    with ctx.recording() as recorder:
        stepped.update()
    return recorder.log()


def wide_step(ctx, frozen):
    """What the third step of a model with large parameters sends; so many layers are frozen."""
    model = wide()
    model[:frozen].requires_grad_(False)
    optimizer = _sharded(ctx, model)
    for _ in range(3):
        with ctx.recording() as recorder:
            step_on_ones(model, optimizer)
    return recorder.log()


def _sharded(ctx, model):
    kind, options = OPTIMIZERS["adamw"]
    return ctx.impl.sharded_optimizer(model.parameters(), kind, **options)


@clause("zero1.traffic.one-copy-per-step", source="contract: one-copy; " + VOLUME)
def test_a_step_sends_one_copy_of_the_parameters(world):
    """A step MUST send every parameter once, and neither gradients nor state.

    An all-reduce of the weights, with zeros for what others own, sends twice as much and gives the
    same numbers.
    """
    traffic.sent_once(world.run(wide_step, 0), numel=DEPTH * LAYER, padding=DEPTH * PADDING)


@clause(
    "zero1.traffic.frozen-not-sent",
    source="contract: one-copy; "
    "a frozen parameter does not change; ZeroRedundancyOptimizer sends it all the same",
    worlds=(2,),
)
def test_frozen_parameters_are_not_sent(world):
    """A step MUST NOT send frozen parameters."""
    logs = world.run(wide_step, DEPTH // 2)

    traffic.sent_once(
        logs,
        numel=DEPTH // 2 * LAYER,
        padding=DEPTH // 2 * PADDING,
        likely="all parameters are sent, whether they can change or not",
    )


def sends_at_most(world, most, likely):
    """No rank may issue more collectives in a step."""
    __tracebackhide__ = True
    for rank, log in enumerate(world.run(wide_step, 0)):
        number = len(log.collectives())
        expected = f"rank {rank}: expected at most {most} collectives, got {number}"
        judge.holds(number <= most, expected, likely=likely)


@clause(
    "zero1.traffic.at-most-one-message-each",
    source="contract: few-messages; " + VOLUME,
    worlds=(2,),
)
def test_a_step_sends_at_most_one_message_per_parameter(world):
    """A step MUST NOT need more collectives than there are parameters."""
    likely = "options or sizes are sent in every step, or each parameter more than once"
    sends_at_most(world, 2 * DEPTH, likely)


@clause(
    "zero1.traffic.few-messages",
    source="contract: few-messages; "
    "ZeroRedundancyOptimizer, parameters_as_bucket_view=True: one per rank",
)
def test_a_step_sends_a_few_messages(world):
    """A step SHOULD send one message per rank, not one per parameter: small ones are slow."""
    sends_at_most(world, world.size, "one message per parameter")


@clause(
    "zero1.traffic.same-order-on-all-ranks",
    source="contract: same-order; collectives are paired by position",
)
def test_all_ranks_issue_the_same_collectives(world):
    """All ranks MUST issue the same collectives in a step, whichever rank owns a parameter."""
    agreement.same_collectives(world.run(third_step, f"{TOY} adamw"), given="third step")


def bytes_that_stay(ctx):
    """Bytes that construction and two steps leave behind; gradients are older."""
    model = wide()
    for parameter in model.parameters():
        parameter.grad = parameter.new_ones(parameter.shape)
    with ctx.recording() as recorder:
        optimizer = _sharded(ctx, model)
        optimizer.step()
        optimizer.step()
        return recorder.live_bytes


@clause(
    "zero1.footprint.state-is-a-share",
    source="contract: state-divided; Rajbhandari et al. 2020, section 5.1 and figure 1",
    worlds=(4,),
)
def test_a_rank_keeps_a_share_of_the_state(world):
    """A rank MUST NOT keep more than its share of the state and one copy of the parameters.

    Whatever `.state` shows: an inner optimizer that holds the rest is found by its bytes. The copy
    is for flat buffers that parameters have become views of.
    """
    parameter_bytes = 4 * DEPTH * LAYER
    footprint.at_most(
        list(world.run(bytes_that_stay)),
        {
            "share of two moments": 2 * parameter_bytes // world.size,
            "the largest parameter's": 2 * 4 * WIDTH * WIDTH,
            "flat parameters": parameter_bytes,
            "counters and padding": 4 * DEPTH * PADDING,
        },
        quantity="new bytes",
        likely="every rank keeps the moments of all parameters",
    )


NUM_LAYERS, SMALL_LAYER = 64, 16 * 16


def equal_layers():
    """A model that 64 ranks can divide evenly."""
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(NUM_LAYERS)])


def one_rank(ctx, rank, num_ranks):
    """What `rank` of `num_ranks` sends in its second step."""
    model = equal_layers()
    with pretended(rank, num_ranks):
        optimizer = _sharded(ctx, model)
        for _ in range(2):
            with ctx.recording() as recorder:
                step_on_ones(model, optimizer)
    return recorder.log()


def state_of_one_rank(ctx, rank, num_ranks):
    with pretended(rank, num_ranks):
        return state_bytes(ctx, equal_layers)


@clause(
    "zero1.traffic.any-world-size",
    source="contract: one-copy; "
    "Rajbhandari et al. 2020, section 7: volume does not depend on the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_a_step_sends_one_copy_on_many_ranks(world, num_ranks):
    """On 8 and 64 ranks a step MUST send one copy of the parameters, and nothing else."""
    logs = [*large_worlds.first_and_last(world, num_ranks, one_rank).values()]

    # Lengths that the ranks divide, beginnings on cache lines.
    traffic.sent_once(
        logs,
        numel=NUM_LAYERS * SMALL_LAYER,
        num_ranks=num_ranks,
        padding=NUM_LAYERS * 16,
        given=large_worlds.both(num_ranks),
    )
    agreement.same_collectives(logs, given=large_worlds.both(num_ranks))


@clause(
    "zero1.footprint.any-world-size",
    source="contract: balanced; "
    "Rajbhandari et al. 2020, figure 1: memory falls with the number of ranks",
    worlds=(1,),
)
@large_worlds.SIZES
def test_a_rank_of_many_keeps_one_part_of_the_state(world, num_ranks):
    """On 8 and 64 ranks a rank MUST keep one part in 8 or 64 of the state, and a parameter's."""
    ends = large_worlds.first_and_last(world, num_ranks, state_of_one_rank)

    footprint.at_most(
        [*ends.values()],
        {
            "share of two moments": 2 * 4 * NUM_LAYERS * SMALL_LAYER // num_ranks,
            "one parameter's": 2 * 4 * SMALL_LAYER,
            "counters": 8 * NUM_LAYERS,
        },
        quantity="state bytes",
        likely="parameters are dealt to a fixed number of ranks, or nothing is divided",
        given=f"{large_worlds.both(num_ranks)}, {NUM_LAYERS} equal layers",
    )
