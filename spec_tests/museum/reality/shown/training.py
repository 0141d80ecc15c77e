"""Real bugs of training loops: scales of losses, windows, clipping, rates, records."""

from __future__ import annotations

import contextlib
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.museum.reality import faulty
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.train import PlainTrain


@faulty("distillkitplus-5")
class NoDivisionByMicroBatches(PlainTrain):
    """The mean loss of each micro-batch goes into backward, and is not divided by their number.

    https://github.com/agokrani/distillKitPlus/issues/5
    """

    def scale(self, batch, tokens):
        return 1.0 / max(1, self.count(batch))


@faulty("trinity-rft-336")
class MeanOfMeans(PlainTrain):
    """A micro-batch with few tokens weighs as much as one with many.

    https://github.com/agentscope-ai/Trinity-RFT/pull/336
    """

    def scale(self, batch, tokens):
        return 1.0 / (max(1, self.count(batch)) * self.accumulate)


@faulty("torchtitan-2206")
class OwnTokens(PlainTrain):
    """A rank divides by the tokens of its own micro-batches; then gradients are averaged.

    https://github.com/pytorch/torchtitan/pull/2206
    """

    def fetch(self):
        micros = super().fetch()
        self.own = max(1, sum(self.count(batch) for batch in micros))
        return micros

    def scale(self, batch, tokens):
        return 1.0 / self.own


@faulty("labs-molt-56")
class ReportsOneShare(PlainTrain):
    """Every loss is divided by the tokens of the whole window, and the last one is reported.

    https://github.com/NVIDIA-NeMo/labs-molt/pull/56
    """

    def micro_batch(self, index, batch, tokens):
        self.last = super().micro_batch(index, batch, tokens)
        return self.last

    def report(self, loss, tokens):
        return super().report(self.last, tokens)


class ForwardDecides(PlainDdp):
    """Like DistributedDataParallel: the forward reads the flag, and its backward follows."""

    decided = True

    def forward(self, *args, **kwargs):
        self.decided = self.is_synchronised
        return super().forward(*args, **kwargs)

    def on_gradient(self, index):
        now, self.is_synchronised = self.is_synchronised, self.decided
        super().on_gradient(index)
        self.is_synchronised = now

    def finish(self):
        if self.decided:
            super().finish()


class FlagBeforeForward(PlainTrain):
    """Sets the flag of that wrapper, and then calls it."""

    def micro_batch(self, index, batch, tokens):
        if self.is_wrapped():
            self.set_flag(index)
        loss = self.losses(batch)
        if self.is_wrapped():
            self.set_flag(index)
        self.backward(loss * self.scale(batch, tokens))
        super().finish()
        return float(loss.detach())

    def set_flag(self, index):
        self.model.is_synchronised = index == self.accumulate - 1

    @classmethod
    def wrapper_functions(cls):
        return ForwardDecides.functions()


@faulty("build-nanogpt-30")
class FlagAfterForward(FlagBeforeForward):
    """Sets the flag between forward and backward, so each forward sees that of the one before.

    https://github.com/karpathy/build-nanogpt/pull/30
    """

    def micro_batch(self, index, batch, tokens):
        loss = self.losses(batch)
        if self.is_wrapped():
            self.set_flag(index)
        self.backward(loss * self.scale(batch, tokens))
        self.finish()
        return float(loss.detach())


@faulty("funasr-3472")
class SynchronisesTheFirst(PlainTrain):
    """`index % accumulate` is zero at the first micro-batch; it is reduced, later ones stay local.

    https://github.com/modelscope/FunASR/pull/3472
    """

    def window(self, index):
        return super().window(self.accumulate - 1 if index == 0 else 0)

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        if index == 0:
            super().finish()
        return loss

    def finish(self):
        pass


@faulty("super-gradients-653")
class ClipsEachMicroBatch(PlainTrain):
    """Clips what has accumulated after every micro-batch.

    https://github.com/Deci-AI/super-gradients/pull/653
    """

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        if self.max_norm is not None and index < self.accumulate - 1:
            self.clip()
        return loss


@faulty("returnn-1595")
class ClipsScaledGradients(PlainTrain):
    """Compares the norm of gradients of a scaled loss with the bound, and unscales them later.

    https://github.com/rwth-i6/returnn/pull/1595
    """

    loss_scale = 1024.0

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def clip(self):
        norm = super().clip()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.loss_scale
        return norm / self.loss_scale


class SkipsTogether(PlainTrain):
    """Skips the update on all ranks where the loss of any is not finite."""

    def fetch(self):
        self.seen = 0.0
        return super().fetch()

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        self.seen += loss
        return loss

    def clip(self):
        limit = math.inf if self.max_norm is None else self.max_norm
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if self.decide(not math.isfinite(self.seen)):
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def decide(self, is_bad):
        return self.total(float(is_bad)) > 0


@faulty("weathergenerator-2718")
class FirstRankDecides(SkipsTogether):
    """Rank 0 looks at its own loss and tells the others; their losses nobody looks at.

    https://github.com/ecmwf/WeatherGenerator/pull/2718
    """

    def decide(self, is_bad):
        box = torch.tensor([float(is_bad)])
        if self.is_wrapped():
            dist.broadcast(box, src=0)
        return bool(box)


@faulty("deepspeed-8035")
class NoOverflowCheck(PlainTrain):
    """Makes the update with whatever the gradient is.

    https://github.com/deepspeedai/DeepSpeed/pull/8035
    """

    def clip(self):
        limit = math.inf if self.max_norm is None else self.max_norm
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))


@faulty("transformers-24088")
class RatePerRank(PlainTrain):
    """The schedule makes a step for each rank.

    https://github.com/huggingface/transformers/pull/24088
    """

    def set_rate(self, number):
        super().set_rate(number * self.size)


@faulty("accelerate-963")
class RatePerMicroBatch(PlainTrain):
    """The schedule makes a step for each micro-batch.

    https://github.com/huggingface/accelerate/issues/963
    """

    def set_rate(self, number):
        super().set_rate(number * self.accumulate)


@faulty("nanochat-175")
class TokensOfOneMicroBatch(PlainTrain):
    """Reports the tokens of one micro-batch on all ranks as those of the step.

    https://github.com/karpathy/nanochat/pull/175
    """

    def fetch(self):
        micros = super().fetch()
        self.of_one = self.total(float(self.count(micros[0])))
        return micros

    def record(self, **fields):
        return super().record(**{**fields, "tokens": self.of_one})


@faulty("deepspeed-7839")
class DividesByUnusedScale(PlainTrain):
    """Divides gradients by a loss scale that only the optimizer knows of.

    https://github.com/deepspeedai/DeepSpeed/pull/7839
    """

    def finish(self):
        super().finish()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 65536.0


@faulty("megatron-lm-1685")
class NeverFinishes(PlainTrain):
    """Gradients gather locally until a call reduces them; the loop does not make it.

    https://github.com/NVIDIA/Megatron-LM/issues/1685
    """

    def window(self, index):
        return super().window(-1)

    def finish(self):
        pass


@faulty("accelerate-2790")
class UpdatesEachMicroBatch(PlainTrain):
    """The flag that says "reduce now" also says "update now".

    https://github.com/huggingface/accelerate/pull/2790
    """

    def window(self, index):
        return contextlib.nullcontext()

    def micro_batch(self, index, batch, tokens):
        loss = super().micro_batch(index, batch, tokens)
        if index < self.accumulate - 1:
            self.finish()
            self.clip()
            self.optimizer.step()
            self.clear()
        return loss


@faulty("nano-world-model-22")
class ClipsBeforeBackward(PlainTrain):
    """Clips in the function that forms the loss, before its backward has made the gradient.

    https://github.com/simchowitzlabpublic/nano-world-model/pull/22
    """

    def losses(self, batch):
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return super().losses(batch)

    def clip(self):
        bound, self.max_norm = self.max_norm, None
        norm = super().clip()
        self.max_norm = bound
        return norm


class TakesPartialWindow(PlainTrain):
    """Makes an update with the mean over what is left when the data end within a window."""

    def run(self):
        records, self.configured = [], self.accumulate
        for number in range(self.steps):
            self.micros = list(itertools.islice(self.batches, self.configured))
            if not self.micros:
                break
            self.accumulate = len(self.micros)
            records.append(self.step(number))
        return records

    def fetch(self):
        return self.micros


@faulty("ms-swift-10084")
class DividesByFullWindow(TakesPartialWindow):
    """Divides what is left by the number of micro-batches that a full window has.

    https://github.com/modelscope/ms-swift/pull/10084
    """

    def scale(self, batch, tokens):
        return super().scale(batch, tokens) * len(self.micros) / self.configured


@faulty("trl-2456")
class ReportsNormOfTheSum(PlainTrain):
    """Reports the norm of the sum over micro-batches, where their mean is used.

    https://github.com/huggingface/trl/issues/2456
    """

    def record(self, **fields):
        return super().record(**{**fields, "grad_norm": fields["grad_norm"] * self.accumulate})


@faulty("returnn-1379")
class DividesNormalisedLoss(PlainTrain):
    """Divides by the number of micro-batches what was normalised over all of them.

    https://github.com/rwth-i6/returnn/issues/1379
    """

    def scale(self, batch, tokens):
        return super().scale(batch, tokens) / self.accumulate
