"""Near-misses of a training loop: what it is given, and what it says."""

from spec_tests.museum.card import Source

TRAIN = Source("spec_tests.plain.train")
TRAINER = Source("solution.trainer")

TRAIN.near_miss(
    "training.writes-into-targets",
    "training.data.stays-the-callers",
    '- return F.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")',
    "+ counts = (batch[1] != -100).flatten()",
    '+ losses = F.cross_entropy(logits, batch[1].clamp_(min=0).flatten(), reduction="none")',
    "+ return (losses * counts).sum()",
    does="Replaces -100 by 0 in the targets that it is given, to gather by them.",
    seen="A loss of one's own, `logprobs.gather(-1, targets)`.",
    unseen="A loader makes new tensors for each batch.",
)

TRAINER.near_miss(
    "training.goes-on-where-the-optimizer-was",
    "training.rate.of-each-call",
    '+ taken = [int(s["step"]) for s in optimizer.state.values() if "step" in s]',
    "- rate = lr(step - 1)  # once: a schedule may count its calls",
    "+ rate = lr(max(taken, default=step - 1))  # once: a schedule may count its calls",
    does="Takes the number of the step from the optimizer's state.",
    seen="A resumed run needs it.",
    unseen="It is right in the first call, and for optimizers that do not count.",
)

TRAINER.near_miss(
    "training.world-for-group",
    "training.gradient.in-a-group",
    '- group = getattr(model, "process_group", None)',
    "+ group = None",
    does="Counts the ranks of the world, whatever group the wrapper has.",
    seen="`dist.get_world_size()`",
    unseen="One group is all that most runs have.",
)

TRAINER.near_miss(
    "training.clears-what-it-updates",
    "training.gradient.leftovers-outside-the-model",
    "- model.zero_grad(set_to_none=True)  # also what the optimizer does not hold",
    "+ return  # also what the optimizer does not hold",
    does="Clears only the gradients of the optimizer's parameters; takes the norm of the model's.",
    seen="`optimizer.zero_grad()`",
    unseen="An optimizer holds all parameters that train, as a rule.",
)

TRAINER.near_miss(
    "training.zero-is-no-bound",
    "training.clip.to-nothing",
    "- if max_norm is not None:",
    "+ if max_norm:",
    does="Takes a bound of 0 for none.",
    seen="`if max_norm:`",
    unseen="A bound of zero is used only to see what else moves the weights.",
)

TRAINER.near_miss(
    "training.ends-with-its-rates",
    "training.rate.that-ends",
    "+ rate = next(map(lr, [step - 1]), None)",
    "+ if rate is None:",
    "- rate = lr(step - 1)  # once: a schedule may count its calls",
    "+     return  # once: a schedule may count its calls",
    does="Ends in silence when its schedule does.",
    seen="ours, once: `records.extend(map(step, range(steps)))`",
    unseen="A schedule is a function of the step in most runs.",
)
