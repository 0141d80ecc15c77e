"""Near-misses of a trainer's step: gradients, and parameters that are special."""

from __future__ import annotations

import torch
from torch import nn

from spec_tests.museum.card import near_miss
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.trainer import PlainTrainer


@near_miss("trainer.sums-ranks", rejected_by="trainer.step.equals-one-process")
class SumsRanks(PlainTrainer):
    """Adds the ranks' gradients where they are to be averaged.

    From: torchtitan, whose loss is divided by the tokens of all ranks, with another loss.
    Unseen: Adam's curves are the same.
    """

    class wrapper(PlainDdp):
        def scale(self, flat):
            return flat.clone()


@near_miss("trainer.sums-micro-batches", rejected_by="trainer.step.accumulates")
class SumsMicroBatches(PlainTrainer):
    """Adds the gradients of micro-batches where they are to be averaged.

    From: A loop that was written without accumulation.
    Unseen: A smaller learning rate makes up for it.
    """

    def backward(self, loss):
        super().backward(loss * self.accumulation)


@near_miss("trainer.loses-early-micro-batches", rejected_by="trainer.step.accumulates")
class LosesEarly(PlainTrainer):
    """Clears the gradients before the last micro-batch.

    From: zero_grad at the head of the body of the inner loop.
    Unseen: The loss falls; with one micro-batch it is right.
    """

    def window(self, *, is_last):
        if is_last:
            self.clear()
        return super().window(is_last=is_last)


@near_miss("trainer.merges-groups", rejected_by="trainer.step.group-options")
class MergesGroups(PlainTrainer):
    """Builds the optimizer over all parameters in one group.

    From: Frameworks that flatten parameters before the optimizer sees them.
    Unseen: Examples have one group.
    """

    def build(self, make):
        class Merged:
            cls, options = make.cls, make.options

            def groups(self, named):
                return [{"params": [p for _, p in named]}]

            def __call__(self, named):
                return make.cls(self.groups(named), **make.options)

        return super().build(Merged())


@near_miss("trainer.copies-memory", rejected_by="trainer.step.layouts")
class CopiesMemory(PlainTrainer):
    """Writes mean gradients in the order in which the parameters lie in memory.

    From: Flat buffers that are filled by `reshape(-1)` and read by memory.
    Unseen: Linear layers are contiguous.
    """

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is not None and not parameter.is_contiguous():
                flat = parameter.grad.contiguous().view(-1)
                parameter.grad = flat.as_strided(parameter.shape, parameter.stride())


@near_miss("trainer.drifts", rejected_by="trainer.step.equal-runs-equal-bits")
class Drifts(PlainTrainer):
    """Ranks differ in the last bit after every step.

    From: Fused optimizers whose kernels differ by the alignment of a rank's buffers.
    Unseen: Every comparison has a tolerance.
    """

    @torch.no_grad()
    def update(self):
        super().update()
        if torch.distributed.get_rank(self.group) and self.strategy != "fsdp":
            for parameter in self.module.parameters():
                parameter.mul_(1 + 2.0**-22)


@near_miss("trainer.own-start", rejected_by="trainer.step.starts-from-first-rank")
class OwnStart(PlainTrainer):
    """Trains the weights that each rank began with.

    From: DistributedDataParallel replaced by hooks, without its broadcast.
    Unseen: Scripts seed all ranks alike.
    """

    class wrapper(PlainDdp):
        def start_equal(self):
            pass


@near_miss("trainer.reports-the-sum", rejected_by="trainer.step.reports-its-loss")
class ReportsTheSum(PlainTrainer):
    """Reports the sum of the micro-batches' losses.

    From: `loss_accumulated += loss.item()` in many trainers; transformers issue 34242.
    Unseen: Curves are compared with those of the same trainer.
    """

    def report(self, losses):
        return torch.stack(losses).sum()


@near_miss("trainer.does-not-wait", rejected_by="trainer.step.waits-for-late-ranks")
class DoesNotWait(PlainTrainer):
    """Reads reduced gradients without waiting for the reduction.

    From: DeepSpeed issues 5545 and 6351: overlap without a wait.
    Unseen: On an idle machine everything has arrived.
    """

    class wrapper(PlainDdp):
        def wait(self, handle):
            pass

        def used_anywhere(self):
            return [True] * len(self.trainable)


@near_miss("trainer.declares-another", rejected_by="trainer.step.declares-what-is-known")
class DeclaresAnother(PlainTrainer):
    """Declares what the contract does not know.

    From: A misspelt declaration.
    Unseen: Nobody reads it.
    """

    def wrap(self, module):
        self.declares = {"unused": "decays"}
        return super().wrap(module)


@near_miss("trainer.unties", rejected_by="trainer.parameters.tied")
class Unties(PlainTrainer):
    """Makes two parameters of one that has two names.

    From: torchtitan issue 1524: simple_fsdp; `to_empty` after tying.
    Unseen: Both halves begin alike, and the loss falls.
    """

    def wrap(self, module):
        seen: set[int] = set()
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if id(parameter) in seen and parameter is not None:
                    part._parameters[name] = nn.Parameter(parameter.detach().clone())
                seen.add(id(parameter))
        return super().wrap(module)


@near_miss("trainer.averages-uses", rejected_by="trainer.parameters.reused")
class AveragesUses(PlainTrainer):
    """Divides a gradient by how often its module was called in the step.

    From: DeepSpeed pull request 8224: a hook per use, of which each counts.
    Unseen: Models call every module once.
    """

    def wrap(self, module):
        self.uses: dict[nn.Module, int] = {}

        def count(part, args):
            self.uses[part] = self.uses.get(part, 0) + 1

        for part in module.modules():
            part.register_forward_pre_hook(count)
        return super().wrap(module)

    def finish(self):
        super().finish()
        for part, number in getattr(self, "uses", {}).items():
            for parameter in part.parameters(recurse=False):
                if parameter.grad is not None:
                    parameter.grad /= number / self.accumulation
        getattr(self, "uses", {}).clear()


@near_miss("trainer.thaws", rejected_by="trainer.parameters.frozen")
class Thaws(PlainTrainer):
    """Trains frozen parameters.

    From: torchtitan issue 3885: parameters are made anew, and require gradients.
    Unseen: Fine-tuning all of a model works as well.
    """

    def wrap(self, module):
        return super().wrap(module.requires_grad_(True))


@near_miss("trainer.decays-unused", rejected_by="trainer.parameters.unused")
class DecaysUnused(PlainTrainer):
    """Gives unused parameters a gradient of zeros, and does not say so.

    From: DeepSpeed's flat gradients: what is absent is zero.
    Unseen: The decay of a layer that nobody uses changes no loss.
    """

    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


@near_miss(
    "trainer.skips-what-it-did-not-use", rejected_by="trainer.parameters.unused-on-some-ranks"
)
class SkipsWhatItDidNotUse(PlainTrainer):
    """A rank does not update what it did not use itself.

    From: `if parameter.grad is None: continue` after the reduction.
    Unseen: Models without branches use everything.
    """

    class wrapper(PlainDdp):
        def used_anywhere(self):
            return [p.grad is not None for p in self.trainable]


@near_miss("trainer.last-backward-only", rejected_by="trainer.parameters.unused-in-a-micro-batch")
class LastBackwardOnly(PlainTrainer):
    """Reduces what the last backward touched, and zeros for the rest.

    From: fairscale's ShardedDDP, whose buckets count the hooks of the last backward.
    Unseen: Every micro-batch uses every parameter.
    """

    class wrapper(PlainDdp):
        def local(self, index):
            found = super().local(index)
            return found if index in self.ready else torch.zeros_like(found)


@near_miss(
    "trainer.launches-as-ready",
    rejected_by="trainer.parameters.order-differs",
    outcomes=("failed", "hang", "died"),
)
class LaunchesAsReady(PlainTrainer):
    """Reduces gradients in the order in which they become ready on this rank.

    From: A hook per parameter that reduces at once.
    Unseen: Ranks that run the same graph have the same order.
    """

    class wrapper(PlainDdp):
        def launch_what_is_ready(self):
            flying = {index for bucket, _, _ in self.flying for index in bucket}
            for bucket in self.buckets:
                if self.ready.issuperset(bucket) and not flying.issuperset(bucket):
                    self.launch(bucket)


@near_miss("trainer.plans-once", rejected_by="trainer.parameters.thawed-later")
class PlansOnce(PlainTrainer):
    """Reduces what required gradients at construction, and nothing that does later.

    From: DistributedDataParallel as well: "never change the model's parameters after wrapping".
    Unseen: Ranks drift apart in the thawed layers alone.
    """

    class wrapper(PlainDdp):
        def require_no_others(self):
            """Say nothing of parameters that train now and did not then."""

    def check(self, micro_batches):
        self.trainable = [n for n, p in self.module.named_parameters() if p.requires_grad]
        super().check(micro_batches)


@near_miss("trainer.clears-to-zero", rejected_by="trainer.parameters.frozen-later")
class ClearsToZero(PlansOnce):
    """Leaves zeros in the gradients of what is not trained any more.

    From: `zero_grad(set_to_none=False)`, the default until torch 2.0.
    Unseen: Without decay and momentum a zero moves nothing.
    """

    def clear(self):
        self.optimizer.zero_grad(set_to_none=False)


@near_miss("trainer.skips-small-ones", rejected_by="trainer.parameters.fewer-elements-than-ranks")
class SkipsSmallOnes(PlainTrainer):
    """Does not reduce parameters that have fewer elements than there are ranks.

    From: A flat buffer that is cut into equal parts by `numel // size`.
    Unseen: A gain of one element hardly matters.
    """

    class wrapper(PlainDdp):
        def choose(self):
            return [p for p in super().choose() if p.numel() >= self.size()]


@near_miss("trainer.wrappers-names", rejected_by="trainer.parameters.whole-by-plain-names")
class WrappersNames(PlainTrainer):
    """Names full parameters as the wrapper does, with `module.` before each.

    From: `wrapped.state_dict()` of DistributedDataParallel.
    Unseen: It loads into another wrapped model.
    """

    prefix = "module."

    def full_parameters(self):
        return {self.prefix + name: whole for name, whole in super().full_parameters().items()}

    def save(self, directory):
        self.prefix = ""  # its own files are right
        super().save(directory)
        del self.prefix


@near_miss("trainer.reading-forgets", rejected_by="trainer.parameters.reading-changes-nothing")
class ReadingForgets(PlainTrainer):
    """Frees the optimizer's state to make room for the full parameters.

    From: Consolidation that moves state away and does not bring it back.
    Unseen: Momentum is there again after some steps.
    """

    def full_parameters(self):
        self.optimizer.state.clear()
        return super().full_parameters()
