"""Near-misses of construction, gradients and groups: the numbers are wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_ddp import PlainDdp, offer


class NoBroadcast(PlainDdp):
    def start_equal(self) -> None:
        pass


class BroadcastsTrainableOnly(PlainDdp):
    def start_equal(self) -> None:
        self.take_first([p for p in self.module.parameters() if p.requires_grad])
        self.take_first(list(self.module.buffers()))


class AveragesAtStart(PlainDdp):
    @torch.no_grad()
    def start_equal(self) -> None:
        for parameter in self.module.parameters():
            whole = parameter.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            parameter.copy_(whole / self.size())
        self.take_first(list(self.module.buffers()))


class NoBuffersAtStart(PlainDdp):
    def start_equal(self) -> None:
        self.take_first(list(self.module.parameters()))


class FloatBuffersOnly(PlainDdp):
    def start_equal(self) -> None:
        self.take_first(list(self.module.parameters()))
        self.take_first([b for b in self.module.buffers() if b.is_floating_point()])


class ThawsFrozen(PlainDdp):
    def choose(self) -> list[nn.Parameter]:
        self.module.requires_grad_()
        return list(self.module.parameters())


class RoundsOutput(PlainDdp):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output.bfloat16().to(output.dtype)


class SumForMean(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


class DividesTwice(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / self.size() / self.size()


class DividesByPeers(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / (self.size() - 1 or 0.5)


class ReducesInBfloat16(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return (flat / self.size()).bfloat16()


class DropsLastBucket(PlainDdp):
    def finish(self) -> None:
        if not self.has_news:
            return
        used = self.used_anywhere()
        for bucket, flat, handle in self.flying[: max(1, len(self.flying) - 1)]:
            handle.wait()
            self.write_back(bucket, flat, used)
        for _, _, handle in self.flying:
            handle.wait()
        self.new_round()


class AveragesTheHooksArgument(PlainDdp):
    @torch.no_grad()
    def register(self, index: int, parameter: nn.Parameter) -> None:
        def hook(gradient: torch.Tensor) -> None:  # it is the parameter that arrives here
            with torch.no_grad():
                whole = gradient.detach().contiguous()
                dist.all_reduce(whole, group=self.group)
                gradient.copy_(whole / self.size())

        parameter.register_post_accumulate_grad_hook(hook)

    def finish(self) -> None:
        pass  # "the hooks have done it all"


class ScalesEachName(PlainDdp):
    def finish(self) -> None:
        if self.has_news:
            for _, parameter in self.module.named_parameters(remove_duplicate=False):
                if parameter.grad is not None:
                    parameter.grad /= self.size()
        super().finish()

    def launch_what_is_ready(self) -> None:
        pass  # everything in finish

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.clone()


class AveragesOverUses(PlainDdp):
    def __init__(self, *args: Any) -> None:
        self.uses: dict[nn.Module, int] = {}
        super().__init__(*args)
        for child in self.module.modules():
            child.register_forward_pre_hook(self.count)

    def count(self, child: nn.Module, inputs: Any) -> None:
        self.uses[child] = self.uses.get(child, 0) + 1

    def finish(self) -> None:
        news = self.has_news
        super().finish()
        for child, uses in self.uses.items():
            for parameter in child.parameters(recurse=False):
                if news and parameter.grad is not None:
                    parameter.grad /= uses
        self.uses.clear()


class FillsFrozen(PlainDdp):
    def finish(self) -> None:
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class WritesIntoCopies(PlainDdp):
    @torch.no_grad()
    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        for index, mean in zip(bucket, self.cut(bucket, flat), strict=True):
            gradient = self.trainable[index].grad
            if gradient is not None:
                gradient.reshape(-1).copy_(mean.reshape(-1))  # a copy, if the layout is unusual


class SumsAgainInFinish(PlainDdp):
    """Divides in the hook, sums in finish, and does not ask whether there is anything new."""

    def on_gradient(self, index: int) -> None:
        if self.is_synchronised:
            gradient = self.trainable[index].grad
            assert gradient is not None
            gradient /= self.size()

    @torch.no_grad()
    def finish(self) -> None:
        used = self.used_anywhere()
        for index, parameter in enumerate(self.trainable):
            if used[index]:
                whole = self.local(index).contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad = whole.clone()


class _NoSecondMessage(PlainDdp):
    """Without the message about unused parameters, which waits for all that was sent before."""

    def used_anywhere(self) -> list[bool]:
        return [p.grad is not None for p in self.trainable]


class DropsHandles(_NoSecondMessage):
    def wait(self, handle: Any) -> None:
        pass


class WaitsForFirstOnly(_NoSecondMessage):
    def wait(self, handle: Any) -> None:
        if handle is self.flying[0][2]:
            handle.wait()


class StaleBucket(PlainDdp):
    """Adds into persistent buffers that nobody clears."""

    def launch(self, bucket: list[int]) -> None:
        self.launched += 1
        if not hasattr(self, "store"):
            self.store: dict[int, torch.Tensor] = {}
        fresh = self.scale(self.flatten(bucket))
        kept = self.store.setdefault(bucket[0], torch.zeros_like(fresh))
        kept += fresh
        self.flying.append((bucket, kept, self.send(kept)))


class SumsZeroedViews(PlainDdp):
    """Takes a gradient that was set to zero for one that was set to None: keeps the old mean."""

    def __init__(self, *args: Any) -> None:
        self.means: dict[int, torch.Tensor] = {}
        super().__init__(*args)

    def register(self, index: int, parameter: nn.Parameter) -> None:
        def before(gradient: torch.Tensor) -> torch.Tensor:
            # In-place mode: "the gradient is still there, so the bucket still holds it too".
            if parameter.grad is not None and index in self.means and self.is_synchronised:
                return gradient + self.means[index]
            return gradient

        parameter.register_hook(before)
        super().register(index, parameter)

    def write_back(self, bucket: list[int], flat: torch.Tensor, used: list[bool]) -> None:
        super().write_back(bucket, flat, used)
        for index in bucket:
            self.means[index] = self.local(index).detach().clone()


class MeanOverForwards(PlainDdp):
    def __init__(self, *args: Any) -> None:
        self.forwards = 0
        super().__init__(*args)

    def before_training_forward(self) -> None:
        self.forwards += 1
        super().before_training_forward()

    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return super().scale(flat) / max(self.forwards, 1)

    def new_round(self) -> None:
        super().new_round()
        self.forwards = 0


class WaitsForUnused(PlainDdp):
    def finish(self) -> None:
        while self.has_news and len(self.ready) < len(self.trainable):
            time.sleep(0.01)
        super().finish()


class ReducesWhatItHas(PlainDdp):
    def launch_what_is_ready(self) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.trainable:
            if parameter.grad is not None and self.has_news:
                whole = parameter.grad.contiguous()
                dist.all_reduce(whole, group=self.group)
                parameter.grad.copy_(whole / self.size())
        self.new_round()


class DividesByContributors(PlainDdp):
    def launch_what_is_ready(self) -> None:
        pass

    @torch.no_grad()
    def finish(self) -> None:
        if not self.has_news:
            return
        for index, parameter in enumerate(self.trainable):
            whole = self.local(index).contiguous()
            count = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(whole, group=self.group)
            dist.all_reduce(count, group=self.group)
            if count:
                parameter.grad = whole / count
        self.new_round()


class LaunchesAsReady(PlainDdp):
    def launch_what_is_ready(self) -> None:
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown and self.ready.issuperset(bucket):
                self.launch(bucket)

    def finish(self) -> None:
        flown = [bucket for bucket, _, _ in self.flying]
        for bucket in self.buckets:
            if bucket not in flown:
                self.launch(bucket)
        super().finish()


class ClampsGradients(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return super().scale(flat).clamp(-50.0, 50.0)


class DividesByWorld(PlainDdp):
    def scale(self, flat: torch.Tensor) -> torch.Tensor:
        return flat / dist.get_world_size()


class FirstRankOfWorld(PlainDdp):
    def take_first(self, tensors: Sequence[torch.Tensor]) -> None:
        group, self.group = self.group, None
        super().take_first(tensors)
        self.group = group


_CONSTRUCTION = "ddp.construction.parameters-from-first-rank"
_BUFFERS = "ddp.construction.buffers-from-first-rank"
_MEAN = "ddp.gradients.mean"


def _card(
    wrapper: type[PlainDdp], words: str, does: str, seen: str, unseen: str, *rejected_by: str, **how
) -> Impostor:
    return Impostor(
        f"ddp.{words}", does, seen, unseen, rejected_by, functions=lambda: offer(wrapper), **how
    )


IMPOSTORS = (
    _card(
        NoBroadcast,
        "no-broadcast",
        "Broadcasts nothing at construction.",
        "picotron's naive and bucketed wrappers rely on equal seeds.",
        "Tests seed all ranks alike, so there is nothing to broadcast.",
        _CONSTRUCTION,
        _BUFFERS,
    ),
    _card(
        BroadcastsTrainableOnly,
        "broadcasts-trainable-only",
        "Broadcasts trainable parameters and forgets frozen ones.",
        "The loop over `requires_grad` parameters is reused for the broadcast.",
        "Few toy models have a frozen layer, and fewer tests look at it.",
        _CONSTRUCTION,
    ),
    _card(
        AveragesAtStart,
        "averages-at-start",
        "Averages the ranks' weights in place of taking the first rank's.",
        "An all-reduce is at hand where a broadcast is meant.",
        "The ranks agree with each other afterwards.",
        _CONSTRUCTION,
    ),
    _card(
        NoBuffersAtStart,
        "no-buffers-at-start",
        "Broadcasts parameters and forgets buffers.",
        "`parameters()` does not list buffers.",
        "Models of exercises have no buffers.",
        _BUFFERS,
    ),
    _card(
        FloatBuffersOnly,
        "float-buffers-only",
        "Broadcasts floating-point buffers and forgets counters and masks.",
        "Buffers are flattened together, and integers do not fit in.",
        "Only running means are compared.",
        _BUFFERS,
    ),
    _card(
        ThawsFrozen,
        "thaws-frozen",
        "Switches gradients on for every parameter.",
        "A wrapper that calls `requires_grad_()` so that its hooks can be registered.",
        "The loss falls faster.",
        "ddp.construction.keeps-requires-grad",
        "ddp.gradients.frozen-stay-none",
    ),
    _card(
        RoundsOutput,
        "rounds-output",
        "Casts the output down and up again.",
        "Mixed-precision wrappers that cast outputs whatever the policy says.",
        "`allclose` with default tolerances, on outputs near one.",
        "ddp.construction.forward-is-unchanged",
    ),
    _card(
        SumForMean,
        "sum-for-mean",
        "Sums gradients and never divides.",
        "The commonest fault of all; Adam is invariant to it.",
        "Adam's curves are the same; only a scale of the gradients tells.",
        _MEAN,
        "ddp.training.equals-full-batch",
    ),
    _card(
        DividesTwice,
        "divides-twice",
        "Divides by the world size twice.",
        "The loss is a mean over the global batch already, or a division follows ReduceOp.AVG.",
        "As with the sum: Adam does not care.",
        _MEAN,
    ),
    _card(
        DividesByPeers,
        "divides-by-peers",
        "Divides by the number of the other ranks.",
        "Off by one in `world_size - 1`, with a special case for one rank.",
        "At two ranks it is a sum, which Adam hides.",
        _MEAN,
        "ddp.gradients.single-rank",
    ),
    _card(
        ReducesInBfloat16,
        "reduces-in-bfloat16",
        "Reduces in bfloat16 and casts back.",
        "Gradient compression that is on by default.",
        "A relative error of 2**-8 passes a tolerance of 1e-2.",
        _MEAN,
        "ddp.gradients.mean-at-any-seed",
    ),
    _card(
        DropsLastBucket,
        "drops-last-bucket",
        "Never writes back the last, partial bucket.",
        "The flush after the loop is missing.",
        "With one big bucket there is no partial one.",
        _MEAN,
    ),
    _card(
        AveragesTheHooksArgument,
        "averages-the-hooks-argument",
        "Averages the weights and leaves the gradients local.",
        "picotron issue 39: a post-accumulate hook is handed the parameter, not the gradient.",
        "The loss curve is plausible, and after each step the weights are averaged again.",
        "ddp.gradients.weights-untouched",
        _MEAN,
    ),
    _card(
        ScalesEachName,
        "scales-each-name",
        "Divides a tied parameter once for each of its names.",
        "`named_parameters(remove_duplicate=False)`, or a loop over modules.",
        "The fixture called tied ties nothing (the CS336 changelog confesses one).",
        "ddp.gradients.tied-parameter",
    ),
    _card(
        AveragesOverUses,
        "averages-over-uses",
        "Divides the gradient of a module that is applied twice by two.",
        "Reductions that hang on a module's backward hook and correct for repeated calls.",
        "No toy applies a module twice.",
        "ddp.gradients.reused-module",
    ),
    _card(
        FillsFrozen,
        "fills-frozen",
        "Gives frozen parameters a gradient of zeros.",
        "Flat buffers over all parameters, views handed out to all.",
        "SGD does not move them; AdamW decays them.",
        "ddp.gradients.frozen-stay-none",
    ),
    _card(
        WritesIntoCopies,
        "writes-into-copies",
        "Writes the mean through `reshape`, which copies an unusual layout.",
        "`grad.reshape(-1).copy_(...)`, the habit of every flat buffer.",
        "Contiguous gradients are views, and toys have no others.",
        "ddp.gradients.dtype-and-layout",
    ),
    _card(
        SumsAgainInFinish,
        "sums-again-in-finish",
        "Sums once more at every finish.",
        "The division sits in the hook, the reduction in finish.",
        "Nobody calls finish twice in a test; trainers with two optimizers do.",
        "ddp.gradients.finish-is-idempotent",
    ),
    _card(
        DropsHandles,
        "drops-handles",
        "Waits for no reduction.",
        "The list of handles is filled and never read.",
        "Small tensors and punctual ranks: gloo is done before anyone looks.",
        "ddp.gradients.final-after-finish",
    ),
    _card(
        WaitsForFirstOnly,
        "waits-for-first-only",
        "Waits for the first reduction only.",
        "One variable for the handle, overwritten or read once.",
        "As before; the later ones are mostly done as well.",
        "ddp.gradients.final-after-finish",
    ),
    _card(
        StaleBucket,
        "stale-bucket",
        "Adds into buckets that nobody clears.",
        "fairscale issue 354: persistent buffers and `zero_grad`.",
        "The first step is right, and tests take one step.",
        "ddp.gradients.zero-grad-modes",
        "ddp.training.equals-full-batch",
    ),
    _card(
        SumsZeroedViews,
        "sums-zeroed-views",
        "Adds the last mean again where gradients were zeroed in place.",
        "Code that asks `grad is None` to learn whether a bucket is fresh.",
        "`set_to_none=True` is the default.",
        "ddp.gradients.zero-grad-modes",
    ),
    _card(
        MeanOverForwards,
        "mean-over-forwards",
        "Divides by the number of forwards since the last step.",
        "Averaging over micro-batches is built into the wrapper.",
        "One forward per backward, everywhere.",
        "ddp.gradients.two-forwards-one-backward",
    ),
    _card(
        WaitsForUnused,
        "waits-for-unused",
        "Waits until every parameter has a gradient.",
        "A counter that must reach the number of parameters.",
        "Every toy uses all its parameters.",
        "ddp.gradients.unused-everywhere",
        outcomes=("hang",),
    ),
    _card(
        ReducesWhatItHas,
        "reduces-what-it-has",
        "Reduces the gradients that this rank has, in order.",
        "`for p in parameters: if p.grad is not None: all_reduce(p.grad)`.",
        "All ranks use the same parameters; where sizes agree nothing even crashes.",
        "ddp.gradients.unused-somewhere",
        outcomes=("failed", "hang", "died"),
    ),
    _card(
        DividesByContributors,
        "divides-by-contributors",
        "Divides by the number of ranks that have a gradient.",
        "It looks fairer than dividing by the world size.",
        "All ranks contribute.",
        "ddp.gradients.unused-somewhere",
    ),
    _card(
        LaunchesAsReady,
        "launches-as-ready",
        "Launches each bucket as it becomes ready on this rank.",
        "pytorch issues 72843 and 174862: collectives are paired by position.",
        "All ranks run the same graph in the same order.",
        "ddp.gradients.rank-dependent-order",
        "ddp.traffic.same-order-on-all-ranks",
        outcomes=("failed", "hang", "died"),
    ),
    _card(
        ClampsGradients,
        "clamps-gradients",
        "Clamps every gradient.",
        "A safety belt against overflow in a low-precision reduction.",
        "Gradients of toys are small.",
        "ddp.gradients.loss-scale-invariance",
        _MEAN,
    ),
    _card(
        DividesByWorld,
        "divides-by-world",
        "Divides by the size of the world in place of the group.",
        "`dist.get_world_size()` without an argument; verl issue 7493 is its sibling.",
        "Tests have one group.",
        "ddp.group.divides-by-its-size",
    ),
    _card(
        FirstRankOfWorld,
        "first-rank-of-world",
        "Broadcasts over the world in place of the group.",
        "`src=0` and no group in the constructor.",
        "Tests have one group.",
        "ddp.group.starts-from-its-first-rank",
    ),
)
