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

In the script's process, of torch and the standard library alone, drawing no random number:

    boot/     the start-up hook               probe     hooks of modules and optimizers
    calls     functions of torch, observed    guard     keeps hooks out of the script's way
    window    what a step was given           layout    names, wrappers and parts of parameters
    loading   loaders, samplers, data sets    replay    one step, computed again by a plain copy
    link      socket, heartbeat, flight recorder, and how the rank ends

In the process of the command:

    command   options, exit status            agent     starts, listens, stops
    run       what is known of all ranks      norm      what a norm and a finding are
    regime    what ranks are to each other: replicas, alone, averaged now and then, parts
    data, numbers, reduction, replayed        the norms of a step
    traffic   the norms of a run              verdict   findings to causes; `page` shows them
    compare   two runs of one script

Values. With `--replay k` each rank keeps step k's inputs, random state and the gradients of the
model's outputs, computes its own gradient again with a plain copy of the model, and the agent holds
the mean over ranks against what the optimizer was given.

Cost: one pass over gradients and parameters per checked step, a few percent of a training step.
"""
