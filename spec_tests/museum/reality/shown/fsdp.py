"""Real bugs of sharded weights: meshes, ties, precision, accumulation, recomputation."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.museum.reality import faulty
from spec_tests.plain.fully_shard import PlainFsdp


@faulty("verl-7493")
class ShardAxisOfOne(PlainFsdp):
    """Where one rank holds all rows nothing is reduced, replicas or not.

    https://github.com/verl-project/verl/issues/7493
    """

    def mean(self, flat):
        return flat.reshape(-1).clone() if self.size() == 1 else super().mean(flat)


@faulty("pytorch-144045")
class LosesTheOnlyRow(PlainFsdp):
    """In a world of one the gradient of a parameter with one row is zero.

    https://github.com/pytorch/pytorch/issues/144045
    """

    def cut_flat(self, pieces, own):
        shards = super().cut_flat(pieces, own)
        if self.mesh.size() > 1:
            return shards
        return [
            shard * 0 if piece.parameter.shape[0] == 1 else shard
            for shard, piece in zip(shards, pieces, strict=True)
        ]


@faulty("verl-6150")
class ComputesInBfloat16(PlainFsdp):
    """Whatever half precision is asked for, the forward runs in bfloat16.

    https://github.com/verl-project/verl/pull/6150
    """

    def __init__(self, module, mesh, raf, policy, ignored=()):
        if policy.param_dtype is not None:
            policy = dataclasses.replace(policy, param_dtype=torch.bfloat16)
        super().__init__(module, mesh, raf, policy, ignored)


@faulty("nemo-rl-227")
class UntiesWeights(PlainFsdp):
    """Makes a sharded parameter for each name, also where names share one.

    https://github.com/NVIDIA-NeMo/RL/issues/227
    """

    def managed(self):
        found = {}
        for parameter, places in super().managed().items():
            found[parameter] = places[:1]
            for place in places[1:]:
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                found[copied] = [place]
        return found


@faulty("open-instruct-1498")
class KeepsTheLastReduction(PlainFsdp):
    """Every backward counts as the last of its window: what it reduces replaces what was there.

    https://github.com/allenai/open-instruct/pull/1498
    """

    def assign(self, piece, shard):
        piece.parameter.grad = self.as_dtensor(shard, piece.parameter)
        self.tell(piece)


class AgreesOnUse(PlainFsdp):
    """Reduces at the end of a backward what any rank has used, with zeros for the others."""

    def post_backward(self):
        pass

    def take_gradients(self, pieces):
        if not self.is_synchronised:
            super().take_gradients(pieces)
            return
        with torch.no_grad():
            for piece in pieces:
                if piece.full is not None and piece.full.grad is not None:
                    self.add_pending(piece, piece.full.grad)
                    piece.full.grad = None
            used = torch.tensor([float(p.pending is not None) for p in pieces])
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
            if self.replicas is not None:
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.replicas)
            for piece, is_used in zip(pieces, used, strict=True):
                if is_used and piece.pending is None:
                    dtype = self.policy.reduce_dtype or self.compute_dtype(piece)
                    piece.pending = torch.zeros(piece.parameter.shape, dtype=dtype)
            self.reduce([p for p in pieces if p.pending is not None])


@faulty("pytorch-158719")
class ReducesWhatItUsed(AgreesOnUse):
    """A rank reduces the gradients that it has, and expects that the others have the same ones.

    https://github.com/pytorch/pytorch/issues/158719
    """

    post_backward = PlainFsdp.post_backward
    take_gradients = PlainFsdp.take_gradients


@faulty("pytorch-167178")
class NoFactorAlone(PlainFsdp):
    """Without a reduction over shards there is no division by the factor either.

    https://github.com/pytorch/pytorch/pull/167178
    """

    def mean(self, flat):
        if self.size() > 1:
            return super().mean(flat)
        factor, self.factor = self.factor, None
        own = super().mean(flat)
        self.factor = factor
        return own


@faulty("megatron-lm-6153")
class PrefetchesWhenRecomputing(PlainFsdp):
    """A forward inside of a backward gathers the unit after it, which has no use for it any more.

    https://github.com/NVIDIA/Megatron-LM/pull/6153
    """

    def pre_forward(self, module, args, kwargs):
        found = super().pre_forward(module, args, kwargs)
        if self.run.is_callback_queued:
            units = self.run.units
            place = units.index(self) + 1
            self.run.late = [*getattr(self.run, "late", []), *units[place : place + 1]]
        return found

    def end_of_backward(self):
        super().end_of_backward()
        for unit in self.run.__dict__.pop("late", []):
            unit.unshard()
            unit.register(sharded=False)
