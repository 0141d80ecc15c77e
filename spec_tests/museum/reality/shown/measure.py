"""Real bugs of measurement: what is counted, over which time, and what else lies in memory."""

from __future__ import annotations

import statistics

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spec_tests.museum.reality import faulty
from spec_tests.plain.throughput import PlainSweep, PlainThroughput


class CountsProducts:
    """Counts what a forward multiplies, and twice that for its backward."""

    def of(self, model, length):
        if length < 1:
            raise ValueError(f"sequence_length: expected a positive number, got {length}")
        state = torch.get_rng_state()
        ids = torch.zeros(1, length, dtype=torch.int64, device=next(model.parameters()).device)
        # The counter knows no formula for the fused attention of a CPU.
        plain = sdpa_kernel(SDPBackend.MATH)
        with torch.no_grad(), plain, FlopCounterMode(display=False) as counter:
            model(ids)
        torch.set_rng_state(state)
        return 3 * counter.get_total_flops() // length

    @classmethod
    def functions(cls):
        """Return the contract's function for this class."""

        def flops_per_token(model, *, sequence_length):
            return cls().of(model, sequence_length)

        return {"flops_per_token": flops_per_token}


@faulty("prime-rl-803")
class CountsLookups(CountsProducts):
    """Takes every parameter for one that multiplies, embeddings too.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/803
    """

    def of(self, model, length):
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        return super().of(model, length) + 6 * sum(table.numel() for table in tables)


@faulty("trl-5293")
class AllTokensOverTheLastStep(PlainThroughput):
    """The clock starts anew with each step, the count of tokens does not.

    https://github.com/huggingface/trl/pull/5293
    """

    num_seen = 0

    def seconds(self):
        self.num_seen += 1
        self.last = super().seconds()
        return self.last

    def report(self):
        found = super().report()
        return {**found, "tokens_per_s": self.num_seen * self.tokens / self.last}


@faulty("xtuner-977")
class MeanOfRates(PlainThroughput):
    """Averages tokens over time of single steps: quick ones weigh more than they last.

    https://github.com/InternLM/xtuner/issues/977
    """

    def middle(self, timed):
        return 1 / statistics.fmean(1 / each for each in timed)


@faulty("flashoptim-1")
class BuildsAllFirst(PlainSweep):
    """Makes every model before it measures the first one.

    https://github.com/databricks/flashoptim/issues/1
    """

    def rows(self):
        self.built = {}
        for size in self.sizes:
            try:
                self.built[size] = self.build(size)
            except torch.OutOfMemoryError:
                self.built[size] = None
        return super().rows()

    def measure(self, size):
        if self.built[size] is None:
            raise torch.OutOfMemoryError(f"batch size {size} did not fit")
        build, self.build = self.build, self.built.__getitem__
        try:
            return super().measure(size)
        finally:
            self.build = build
