"""Near-misses of a training loop: sizes, data, NaN, traffic, records; lines of the reference."""

from spec_tests.museum.card import Source

TRAIN = Source("spec_tests.plain.train")
TRAINER = Source("solution.trainer")

TRAIN.near_miss(
    "training.floors",
    ("training.accumulation.refuses-a-remainder", "training.data.refuses-a-remainder"),
    "- if whole % (micro * size):",
    '-     raise ValueError(f"{whole} does not divide by {micro} * {size}")',
    "- return whole // (micro * size)",
    "+ return max(1, whole // (micro * size))",
    does="Rounds the number of micro-batches down.",
    seen="A course's trainer: global 6, micro 2, two ranks trains with 4.",
    unseen="It trains.",
)

TRAIN.near_miss(
    "training.says-indivisible",
    "training.accumulation.names-the-numbers",
    '- raise ValueError(f"{whole} does not divide by {micro} * {size}")',
    '+ raise ValueError("the batch does not divide into micro-batches")',
    does="Refuses a remainder without saying of what.",
    seen="assert global_batch % micro_batch == 0, and a word to it.",
    unseen="It is an error, as it should be.",
)

TRAIN.near_miss(
    "training.forgets-ranks",
    ("training.accumulation.fills-the-global-batch", "training.data.takes-what-it-uses"),
    "- return whole // (micro * size)",
    "+ return whole // micro",
    does="Each rank runs the whole global batch.",
    seen="global_batch // micro_batch.",
    unseen="The loss falls faster per step.",
)

TRAIN.near_miss(
    "training.takes-partial-step",
    "training.data.no-partial-step-in-silence",
    "- micros = [next(given) for _ in range(accumulate)]",
    "+ micros = [batch for _, batch in zip(range(accumulate), given)]",
    "+ if not micros:",
    '+     raise RuntimeError("the data have ended")',
    "...",
    "- (own * (size / tokens)).backward()",
    "+ (own * (size / tokens) * len(micros) / accumulate).backward()",
    does="A step with a third of its data is scaled as a whole one.",
    seen="Lightning issue 19987: 1/N on a window of fewer.",
    unseen="Only the last step of an epoch is like that.",
)

TRAIN.near_miss(
    "training.steps-on-nan",
    "training.finite.spares-the-weights",
    "- if norm != norm:  # the same on all ranks: gradients are",
    '-     raise RuntimeError("the gradient is NaN")',
    does="Updates with NaN, and reports it.",
    seen="clip_grad_norm_ without a look at its result.",
    unseen="It shows in the next line of the log, when the weights are gone.",
)

TRAIN.near_miss(
    "training.never-inside",
    "training.traffic.one-reduction-per-step",
    "- with contextlib.nullcontext() if is_last or not is_wrapped else model.no_sync():",
    "+ with contextlib.nullcontext():",
    does="no_sync is not used.",
    seen="sentence-transformers issue 4027, PiPPy issue 1133.",
    unseen="The numbers are right.",
)

TRAIN.near_miss(
    "training.ends-alone",
    "training.data.ranks-end-together",
    does="A rank whose data end raises by itself.",
    seen="StopIteration on one rank, as in most loops.",
    unseen="Loaders give every rank equally many batches.",
    outcomes=("hang", "failed"),
)

TRAINER.near_miss(
    "training.patched-leftovers",
    "training.gradient.leftovers-do-not-count",
    "- _drop_gradients(model, optimizer)",
    "  try:",
    does="Gradients from before enter the first step.",
    seen="One line of the reference, changed.",
    unseen="Tests begin with fresh parameters.",
)

TRAIN.near_miss(
    "training.norm-after-clipping",
    "training.records.norm-before-clipping",
    '- "grad_norm": norm,',
    '+ "grad_norm": min(norm, limit),',
    does="Reports the norm after clipping.",
    seen="A norm that is computed once more for the log.",
    unseen="It is max_norm in every line, and looks calm.",
)

TRAIN.near_miss(
    "training.own-loss",
    "training.records.loss-of-all-ranks",
    '- "loss": total(loss, is_wrapped) / tokens,',
    '+ "loss": loss * size / tokens,',
    does="Reports the rank's own loss.",
    seen="A course's _aggregate_loss whose all_reduce is still a comment.",
    unseen="The weights are right, and rank 0 prints a loss that falls.",
)

TRAIN.near_miss(
    "training.counts-padding",
    "training.records.tokens",
    '- "tokens": tokens,',
    '+ "tokens": float(size * sum(batch[1].numel() for batch in micros)),',
    does="Padding counts as tokens.",
    seen="targets.numel().",
    unseen="Without padding it is right.",
)

TRAIN.near_miss(
    "training.last-record",
    "training.records.one-per-step",
    "- return records",
    "+ return records[-1:]",
    does="Returns the last step's record only.",
    seen="A list that is made anew inside the loop: efficient-dl-systems, week 5.",
    unseen="A parity test compared one step and believed it was five.",
)

TRAIN.near_miss(
    "training.rate-per-micro-batch",
    "training.rate.pure-function-of-the-step",
    '- group["lr"] = lr(number)',
    '+ group["lr"] = lr(number * accumulate)',
    does="The schedule counts micro-batches.",
    seen="accelerate issue 963.",
    unseen="Without accumulation it is right.",
)

TRAIN.near_miss(
    "training.rate-per-rank",
    "training.rate.pure-function-of-the-step",
    '- group["lr"] = lr(number)',
    '+ group["lr"] = lr(number * size)',
    does="The schedule runs W times as fast.",
    seen="accelerate issue 1382, diffusers issue 3954.",
    unseen="On one process it is right.",
)

TRAIN.near_miss(
    "training.reports-next-rate",
    "training.rate.reported-is-used",
    "  optimizer.step()",
    "+ for group in optimizer.param_groups if lr is not None else ():",
    '+     group["lr"] = rate = float(lr(number + 1))',
    does="Reports the rate of the next step.",
    seen="get_last_lr() after scheduler.step(), in a course's loop.",
    unseen="The curve is shifted by one.",
)
