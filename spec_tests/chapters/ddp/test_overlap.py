"""Overlap: reductions run while the backward still computes.

Hiding the reduction behind the backward is why a wrapper hooks into autograd at all. It is seen
without a clock: by the order of events on one rank, and by one rank getting ahead of another that
waits for it. See Li et al. 2020, section 3.2.3.
"""

from __future__ import annotations

import time

import torch

from spec_tests.programs.laws import traffic
from spec_tests.programs.ways import Replicas, replicated
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.recorder import Kind

clause = clauses(judges=("ddp", "ddp_bucketed"), level="production")
OVERLAP = "Li et al. 2020, section 3.2.3"
# Right code gives the sign at once; only a crowded machine needs any of this.
PATIENCE_S = 4.0
LEAST = 64  # elements of gradients: fewer are flags, or a size


def stream_of_events(ctx, subject):
    """The third step's collectives among the moments at which gradients were ready."""
    # Layers that fill a bucket each: of 1 MiB where that is asked, of 25 MiB by most defaults.
    width, number = (600, 3) if subject == "ddp_bucketed" else (2600, 2)
    layers = [torch.nn.Linear(width, width) for _ in range(number)]
    module = torch.nn.Sequential(*layers).to(ctx.device)
    wrapped = replicated(ctx, subject, module, bucket_size_mb=1.0)
    inputs = torch.ones(2, width, device=ctx.device)
    for _ in range(2):
        module.zero_grad()
        wrapped(inputs).sum().backward()
        ctx.impl.finish_gradient_synchronization(wrapped)
    loss = wrapped(inputs).sum()
    with ctx.recording() as recorder:
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda gradient, name=name: recorder.mark(f"ready {name}"))
        loss.backward()
        ctx.impl.finish_gradient_synchronization(wrapped)
    return recorder.log()


@clause("ddp.overlap.starts-during-backward", source="contract: overlaps, early; " + OVERLAP)
def test_the_first_reduction_starts_before_the_last_gradient_is_ready(world, subject):
    """The first reduction MUST be launched before the last gradient is ready."""
    logs = world.run(stream_of_events, subject)

    for rank, log in enumerate(logs):
        marks = [i for i, event in enumerate(log.events) if event.label.startswith("ready")]
        kinds = (*traffic.REDUCTIONS, Kind.SEND, Kind.RECEIVE)
        sent = [i for i, event in enumerate(log.events) if event.kind in kinds]
        first = next((i for i in sent if log.events[i].numel >= LEAST), len(log.events))
        judge.holds(
            first < marks[-1],
            f"rank {rank}: expected a reduction before the last of {len(marks)} gradients, got "
            f"the first one after all of them: {[str(e) for e in log.events][:12]}",
            likely="everything is reduced after backward, or in an order that begins with what "
            "is ready last",
        )


def run_ahead(ctx, subject):
    """Whether the other ranks finish their backward while the last rank has not begun its own.

    The last rank waits, in front of its first gradient, for a sign that rank 0 gives at its last.
    """
    replica = Replicas(ctx, subject, "mlp", bucket_size_mb=1e-6)
    replica.follow("backward 0, zero_grad none, backward 1")
    ahead = ctx.scratch / f"ahead-{subject}"
    if ctx.rank == 0:
        ahead.unlink(missing_ok=True)
    ctx.barrier()
    seen = []
    if ctx.rank == 0:
        last = [p for name, p in replica.named() if name.startswith("first")]
        pending = {id(p) for p in last}

        def arrived(parameter):
            pending.discard(id(parameter))
            if not pending:
                ahead.touch()

        for parameter in last:
            parameter.register_post_accumulate_grad_hook(arrived)
    elif ctx.rank == ctx.world_size - 1:

        def wait(gradient):
            end = time.monotonic() + PATIENCE_S
            while not ahead.exists() and time.monotonic() < end:
                time.sleep(0.002)
            seen.append(ahead.exists())

        replica.plain[-1].register_hook(wait)
    replica.follow("zero_grad none, backward 2")
    return seen


@clause(
    "ddp.overlap.hooks-do-not-block",
    source="contract: overlaps; " + OVERLAP,
    transports=("gloo", "cuda"),
)
def test_a_rank_does_not_wait_inside_its_backward(world, subject):
    """A rank MUST be able to finish computing its backward while a peer has not begun to reduce.

    A blocking reduction inside the hook keeps the order of events and hides nothing.
    """
    # The one who waits for the sign is blocked, and so is whoever blocks in its hook.
    ranks = world.run(run_ahead, subject, grace_s=2 * PATIENCE_S)

    judge.holds(
        ranks[-1] == [True],
        "expected rank 0 to compute its whole backward while the last rank had not reduced "
        f"anything yet; it was still waiting after {PATIENCE_S:.0f} seconds",
        likely="the hook waits for its own reduction: it blocks inside the backward",
    )
