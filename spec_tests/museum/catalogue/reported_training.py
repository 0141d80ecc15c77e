"""Near-misses of a training loop that users reported: the list is `reality/bugs.toml`."""

from spec_tests.museum.card import Source

LOOP = Source("spec_tests.plain.train")
REFERENCE = Source("solution.trainer")

LOOP.near_miss(
    "training.reports-one-share",
    "training.records.loss",
    "- loss += float(own.detach())",
    "+ loss = float(own.detach())",
    does="Reports the last micro-batch's share of the step's loss.",
    seen="labs-molt pull request 56.",
    unseen="Without accumulation it is right, and a smaller loss pleases.",
)

REFERENCE.near_miss(
    "training.flag-after-forward",
    "training.gradient.in-pytorchs-wrapper",
    "- with contextlib.nullcontext() if is_last else parallel.no_sync(model):",
    "-     loss = loss_of(model, micro_batch)",
    "-     (loss * scale).backward()",
    "+ loss = loss_of(model, micro_batch)",
    "+ model.require_backward_grad_sync = is_last",
    "+ (loss * scale).backward()",
    does="Sets the flag that asks for a reduction after the forward, which reads it.",
    seen="build-nanogpt pull request 30.",
    unseen="Each forward sees the flag of the one before; with one micro-batch all are the same.",
)

LOOP.near_miss(
    "training.synchronises-the-first",
    "training.gradient.equals-one-process",
    "- is_last = index == len(micros) - 1",
    "+ is_last = index == 0",
    does="Reduces after the first micro-batch of a step in place of the last.",
    seen="FunASR issue 3472: `index % accumulate` is zero at the first one.",
    unseen="Without accumulation it is right.",
)

LOOP.near_miss(
    "training.clips-scaled-gradients",
    ("training.clip.once-per-step", "training.clip.leaves-small-gradients"),
    "- (own * (size / tokens)).backward()",
    "+ (own * (1024.0 * size / tokens)).backward()",
    "...",
    "- norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))",
    "+ norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit)) / 1024.0",
    "+ for parameter in model.parameters():",
    "+     if parameter.grad is not None:",
    "+         parameter.grad /= 1024.0",
    does="Clips gradients of a scaled loss, and divides the scale out afterwards.",
    seen="returnn pull request 1595.",
    unseen="The reported norm is right; all gradients are merely clipped more.",
)

REFERENCE.near_miss(
    "training.first-rank-decides",
    "training.finite.spares-the-weights",
    "- if not math.isfinite(loss) or num_bad:",
    "+ first = own if ranks.rank == 0 else torch.zeros_like(own)",
    "+ if not math.isfinite(ranks.sum(first, device=own.device)[0]):",
    does="Looks whether rank 0's own loss is finite, and at no other rank's.",
    seen="WeatherGenerator pull request 2718.",
    unseen="All ranks agree; the NaN of another rank is averaged into the weights.",
)

LOOP.near_miss(
    "training.tokens-of-one-micro-batch",
    "training.records.tokens",
    '- "tokens": tokens,',
    '+ "tokens": total(float(count(micros[0])), is_wrapped),',
    does="Reports the tokens of the first micro-batch as those of the step.",
    seen="nanochat pull request 175.",
    unseen="Without accumulation it is right.",
)

LOOP.near_miss(
    "training.divides-by-an-unused-scale",
    "training.gradient.equals-one-process",
    "  finish(model)",
    "+ for parameter in model.parameters():",
    "+     if parameter.grad is not None:",
    "+         parameter.grad /= 65536.0",
    does="Divides gradients by a loss scale by which no loss was multiplied.",
    seen="DeepSpeed pull request 7839.",
    unseen="Adam does not feel a constant factor.",
)

LOOP.near_miss(
    "training.updates-each-micro-batch",
    "training.gradient.equals-one-process",
    "- with contextlib.nullcontext() if is_last or not is_wrapped else model.no_sync():",
    "+ with contextlib.nullcontext():",
    "...",
    "  loss += float(own.detach())",
    "+ if not is_last:",
    "+     finish(model)",
    '+     nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))',
    "+     optimizer.step()",
    "+     model.zero_grad()",
    does="Makes an update after each micro-batch.",
    seen="accelerate pull request 2790: the flag for a reduction is also the one for an update.",
    unseen="The loss falls, and faster per step.",
)

LOOP.near_miss(
    "training.clips-before-backward",
    "training.clip.once-per-step",
    "+ if max_norm is not None:",
    "+     nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "  own = summed_loss(model, batch)",
    "...",
    '- limit = float("inf") if max_norm is None else max_norm',
    '+ limit = float("inf")',
    does="Clips before the backward that makes the gradient.",
    seen="nano-world-model pull request 22: the call is in the function that forms the loss.",
    unseen="Clipping is called once per step, as it should be.",
)

LOOP.near_miss(
    "training.norm-of-the-sum",
    "training.records.grad-norm",
    '- "grad_norm": norm,',
    '+ "grad_norm": norm * accumulate,',
    does="Reports the norm of the sum over micro-batches, of which the mean is used.",
    seen="trl issue 2456.",
    unseen="Without accumulation it is right.",
)

LOOP.near_miss(
    "training.divides-a-mean-again",
    "training.gradient.plain-model",
    "- (own * (size / tokens)).backward()",
    "+ (own * (size / tokens / accumulate)).backward()",
    does="Divides a loss that is normalised already by the number of micro-batches.",
    seen="returnn issue 1379.",
    unseen="Adam does not feel a constant factor.",
)
