"""Near-misses of a training loop: what it is given, and what it says."""

from __future__ import annotations

import torch.nn.functional as F

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.train import PlainTrain


@near_miss("training.writes-into-targets", rejected_by="training.data.stays-the-callers")
class WritesIntoTargets(PlainTrain):
    """Replaces -100 by 0 in the targets that it is given, to gather by them.

    From: A loss of one's own, `logprobs.gather(-1, targets)`.
    Unseen: A loader makes new tensors for each batch.
    """

    def losses(self, batch):
        counts = batch[1] != -100
        losses = F.cross_entropy(
            self.model(batch[0]).float().flatten(0, 1),
            batch[1].clamp_(min=0).flatten(),
            reduction="none",
        )
        return (losses * counts.flatten()).sum()


@near_miss("training.goes-on-where-the-optimizer-was", rejected_by="training.rate.of-each-call")
class GoesOnWhereTheOptimizerWas(Patched):
    """Takes the number of the step from the optimizer's state.

    From: what a resumed run needs
    Unseen: It is right in the first call, and for optimizers that do not count.
    """

    module = "solution.trainer"
    find = "rate = lr(step - 1)  #"
    replace = """taken = [int(s["step"]) for s in optimizer.state.values() if "step" in s]
                rate = lr(max(taken, default=step - 1))  #"""


@near_miss("training.world-for-group", rejected_by="training.gradient.in-a-group")
class WorldForGroup(Patched):
    """Counts the ranks of the world, whatever group the wrapper has.

    From: `dist.get_world_size()`
    Unseen: One group is all that most runs have.
    """

    module = "solution.trainer"
    find = 'group = getattr(model, "process_group", None)'
    replace = "group = None"


@near_miss(
    "training.clears-what-it-updates", rejected_by="training.gradient.leftovers-outside-the-model"
)
class ClearsWhatItUpdates(Patched):
    """Clears the gradients of the optimizer's parameters alone, and takes the norm of the model's.

    From: `optimizer.zero_grad()`
    Unseen: An optimizer holds all parameters that train, as a rule.
    """

    module = "solution.trainer"
    find = "    model.zero_grad(set_to_none=True)"
    replace = "    return"


@near_miss("training.zero-is-no-bound", rejected_by="training.clip.to-nothing")
class ZeroIsNoBound(Patched):
    """Takes a bound of 0 for none.

    From: `if max_norm:`
    Unseen: Nobody clips to nothing but to see what else moves the weights.
    """

    module = "solution.trainer"
    find = "if max_norm is not None:"
    replace = "if max_norm:"


@near_miss("training.ends-with-its-rates", rejected_by="training.rate.that-ends")
class EndsWithItsRates(Patched):
    """Ends in silence when its schedule does.

    From: ours, once: `records.extend(map(step, range(steps)))`
    Unseen: A schedule is a function of the step in most runs.
    """

    module = "solution.trainer"
    find = "rate = lr(step - 1)  #"
    replace = """rate = next(map(lr, [step - 1]), None)
                if rate is None:
                    return  #"""
