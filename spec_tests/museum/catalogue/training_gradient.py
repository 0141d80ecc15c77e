"""Near-misses of the gradient of a step, and right but unusual training loops."""

from __future__ import annotations

from spec_tests.museum.card import Source

TRAIN = Source("spec_tests.plain.train")
TRAINER = Source("solution.trainer")

TRAIN.near_miss(
    "training.mean-of-means",
    "training.gradient.token-weighted",
    "- (own * (size / tokens)).backward()",
    "+ (own / max(1, count(batch)) / accumulate).backward()",
    does="Averages the means of the micro-batches.",
    seen="transformers issues 34191 and 34242, torchtune issue 1875: everybody, until 2024.",
    unseen="Without padding it is right.",
)

TRAIN.near_miss(
    "training.own-token-count",
    ("training.gradient.token-weighted", "training.gradient.nothing-to-learn-here"),
    "- (own * (size / tokens)).backward()",
    "+ (own / max(1, sum(map(count, micros)))).backward()",
    does="Divides by the rank's own number of targets.",
    seen="The fix of 2024, without the sum over ranks: transformers issue 35203.",
    unseen="On one process it is right.",
)

TRAIN.near_miss(
    "training.counts-by-environment",
    "training.gradient.world-of-the-group",
    "  import contextlib",
    "+ import os",
    "...",
    "- size = dist.get_world_size() if is_wrapped else 1",
    '+ size = int(os.environ.get("WORLD_SIZE", "1")) if is_wrapped else 1',
    does="Takes the number of ranks from WORLD_SIZE.",
    seen="A course's trainer: os.environ where dist.get_world_size() belongs.",
    unseen="Under torchrun the two agree.",
)

TRAIN.near_miss(
    "training.views-targets",
    "training.gradient.slices",
    '- return F.cross_entropy(logits, batch[1].flatten(), ignore_index=-100, reduction="sum")',
    '+ return F.cross_entropy(logits, batch[1].view(-1), ignore_index=-100, reduction="sum")',
    does="Flattens targets with `.view(-1)`.",
    seen="A course's trainer.",
    unseen="Its loader copies before it yields, so its own targets are contiguous.",
)

TRAIN.near_miss(
    "training.no-division",
    ("training.gradient.plain-model", "training.gradient.equals-one-process"),
    "- (own * (size / tokens)).backward()",
    "+ (own * (accumulate * size / tokens)).backward()",
    does="Micro-batches are added up and not averaged.",
    seen="A loop that was written for one micro-batch.",
    unseen="Adam, again.",
)

TRAIN.near_miss(
    "training.never-reduces",
    ("training.gradient.equals-one-process", "training.gradient.several-steps"),
    "- is_last = index == len(micros) - 1",
    "+ is_last = False",
    "...",
    "- finish(model)",
    does="The last micro-batch is inside no_sync as well.",
    seen="An off-by-one in the index of the last micro-batch: FunASR issue 3472.",
    unseen="Rank 0's loss falls.",
)

TRAIN.near_miss(
    "training.leaves-last-gradient",
    "training.gradient.two-calls-are-one",
    "- optimizer.zero_grad()",
    "- model.zero_grad()  # also what the optimizer does not hold",
    "...",
    "  optimizer.step()",
    "+ if number < steps - 1:",
    "+     optimizer.zero_grad()",
    "+     model.zero_grad()",
    does="The last step's gradient is still there for the next call.",
    seen="A course's trainer.",
    unseen="train() is called once.",
)

TRAIN.near_miss(
    "training.clips-each-micro-batch",
    "training.clip.once-per-step",
    "  loss += float(own.detach())",
    "+ if max_norm is not None and not is_last:",
    "+     nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    does="Clips after every micro-batch, before the reduction.",
    seen="clip_grad_norm_ right after backward.",
    unseen="Without accumulation it is right.",
)

TRAIN.benign(
    "benign.train-scales-afterwards",
    "  loss = 0.0",
    "+ seen = 0.0",
    "...",
    "- (own * (size / tokens)).backward()",
    "+ seen += total(float(count(batch)), is_wrapped)",
    "+ own.backward()",
    "...",
    "  finish(model)",
    "+ for parameter in model.parameters():",
    "+     if parameter.grad is not None:",
    "+         parameter.grad *= size / seen",
    does="Sums, counts per micro-batch, divides at last.",
)

TRAIN.benign(
    "benign.train-reports-objects",
    "  import contextlib",
    "+ import types",
    "...",
    "- return records",
    "+ tensors = [{n: torch.tensor(v) for n, v in record.items()} for record in records]",
    "+ return [types.SimpleNamespace(**record) for record in tensors]",
    does="Records have attributes, and tensors in them.",
)

TRAIN.benign(
    "benign.train-looks-ahead",
    "  import contextlib",
    "+ import collections",
    "...",
    "- given = iter(batches)",
    "+ source = iter(batches)",
    "+ given = iter([next(source) for _ in range(steps * accumulate)])",
    "...",
    "- return records",
    '+ kind = collections.namedtuple("Record", ["loss", "lr", "grad_norm", "tokens"])',
    "+ return [kind(**record) for record in records]",
    does="Takes the data of all steps before the first.",
)

TRAIN.benign(
    "benign.train-barriers",
    "+ if is_wrapped:",
    "+     dist.barrier()",
    "  optimizer.zero_grad()",
    does="Ranks wait for each other in every step.",
)

TRAIN.benign(
    "benign.train-plain", does="The base of the training impostors; the loss is in float32."
)

TRAINER.near_miss(
    "training.shards-own-norm",
    "training.clip.of-shards",
    "- norm = clip.total_norm(model.parameters())",
    "+ held = [p.grad for p in model.parameters() if p.grad is not None]",
    "+ local = [g.to_local() if hasattr(g, 'to_local') else g for g in held]",
    "+ norm = torch.nn.utils.get_total_norm(local)",
    does="Clips shards by the norm of this rank's part.",
    seen="`p.grad.to_local()` in a loop over parameters",
    unseen="All ranks clip, each by a little less than it should.",
)

TRAINER.near_miss(
    "training.own-loss-decides",
    "training.finite.decided-together",
    "- if not math.isfinite(loss) or num_bad:",
    "+ if not math.isfinite(own.item()) or num_bad:",
    does="Looks at this rank's part of the loss, where a gradient that is not finite shows on all.",
    seen="The NaN is in the gradient as well, and the gradient is reduced.",
    unseen="It takes an infinite loss whose gradient is finite: a target that is masked out.",
    outcomes=("hang",),
)
