"""`trainspec watch -- torchrun train.py`: judge an unmodified script while it trains.

Problem. What is wrong with a training script is mostly not in its wrapper but between the lines:
two ranks read the same tokens, `no_sync` encloses the backward alone, an optimizer holds
parameters that no module has, one rank skips an update. The loss still falls.

Idea. The command runs with a start-up hook (`boot`) in its environment. In each process that
imports torch the hook loads a *probe*, which observes forwards, backwards, optimizer steps,
clipping and collectives through hooks, and sends what it saw (hashes, norms, sizes: never
tensors) over a socket to the *agent*, the process of the command. The agent compares the ranks.
It needs no second run and no collective: nothing is sent through the script's groups, and a rank
that hangs or dies is a finding like any other.

    boot/       the start-up hook          layout    which parameter is replicated, sharded, tied
    probe       hooks inside a rank        link      the rank's socket, heartbeat, flight recorder
    calls       functions of torch         blocked   whether the rank waits in a collective
    window      what a step was given      finite    which numbers are not finite
    replay      one step, computed again   twin      the plain copy that computes it
    leaving     how a rank ends            run       what the agent knows of all ranks
    loading     loaders and their samplers   compare   two runs of one script
    datasets    what a data set holds        sums      gradients that are summed by hand
    checks, inputs, samples, losses, values, clipping, traffic, replayed_norm    the clauses
    replayed    gradients against it       seen      which clauses had something to look at
    verdict     findings to causes         command   start, listen, stop (`child`), exit status

`boot`, `probe`, `guard`, `calls`, `window`, `layout`, `link`, `blocked`, `finite`, `loading`,
`datasets`, `sums`, `replay`, `twin` and `leaving` run in the script's process: they import torch
and the standard library only, and draw no random number.

Values. With `--replay k` each rank keeps step k's inputs, random state and the gradients of the
model's outputs, computes its own gradient again with a plain copy of the model, and the agent holds
the mean over ranks against what the optimizer was given.

Cost: one pass over gradients and parameters per checked step, a few percent of a training step.
"""
