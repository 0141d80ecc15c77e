"""What each way of training holds in memory and sends per step, in bytes and in words.

Of a model of P bytes in W ranks, with M micro-batches per step and B bytes of P inside blocks:

    kind                  parameters  gradients  AdamW's state   sent per step
    alone                 P           P          2P              nothing
    ddp                   P           P          2P              P: every gradient once
    zero1                 P           P          2P/W            2P: gradients, then new weights
    fsdp_no_shard         P           P          2P              P
    fsdp_shard_grad_op    P/W         P/W        2P/W            MP + P: one gather per micro-batch
    fsdp_full_shard       P/W         P/W        2P/W            M(P + B) + P: blocks gathered again

Gradients are those that the update reads. AdamW also keeps a step count of 4 bytes per tensor.
Bytes are those that a rank hands to its collectives (`solution.measure.traffic`). Activations, of
one micro-batch, are predicted with fake tensors and do not depend on the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from solution.config import ModelConfig
from solution.demo.runs import SEQUENCE_LENGTH, Run
from solution.measure.memory import predict
from solution.models import families

__all__ = ["Theory"]

REASONS = {
    "alone": "nothing: one rank",
    "ddp": "P: every gradient once",
    "zero1": "2P: every gradient, then every new weight",
    "fsdp_no_shard": "P: every gradient once",
    "fsdp_shard_grad_op": "MP + P: a gather per micro-batch, gradients once",
    "fsdp_full_shard": "M(P + B) + P: blocks gathered for forward and backward, gradients once",
}
IS_SHARDED = ("fsdp_shard_grad_op", "fsdp_full_shard")


@dataclass(frozen=True)
class Theory:
    """What is known about a model before it is trained.

    Attributes:
        parameter_bytes, block_bytes: P and B of the module's table.
        num_tensors: how many parameters there are.
        activation_bytes: micro-batch to what a forward and the loss leave for the backward.
    """

    parameter_bytes: int
    block_bytes: int
    num_tensors: int
    activation_bytes: dict[int, int]

    @classmethod
    def of(cls, config: ModelConfig, *, attention: str, micro_batches: set[int]) -> Theory:
        """Return the theory of a model, built in shapes only."""
        with torch.device("meta"):
            model = families.build(config, attention=attention)
        activations = {}
        for size in micro_batches:
            found = predict(model, batch_size=size, sequence_length=SEQUENCE_LENGTH)
            activations[size] = found.terms["activations"]
        tensors, of_blocks = list(model.parameters()), model.blocks.parameters()
        sizes = sum(p.nbytes for p in tensors), sum(p.nbytes for p in of_blocks)
        return cls(*sizes, len(tensors), activations)

    def held(self, run: Run) -> dict[str, int]:
        """Return the bytes per rank by component, at the update; activations of one micro-batch."""
        share = self.parameter_bytes // run.num_ranks
        kept = share if run.kind in IS_SHARDED else self.parameter_bytes
        divides_state = run.kind in IS_SHARDED or run.kind == "zero1"
        counts = 4 * self.num_tensors // (run.num_ranks if run.kind == "zero1" else 1)
        return {
            "parameters": kept,
            "gradients": kept,
            "optimizer": 2 * (share if divides_state else self.parameter_bytes) + counts,
            "activations": self.activation_bytes[run.micro_batch],
        }

    def sent(self, run: Run) -> int:
        """Return the bytes that a rank sends per step."""
        whole, blocks, passes = self.parameter_bytes, self.block_bytes, run.num_micro_batches
        return {
            "alone": 0,
            "ddp": whole,
            "zero1": 2 * whole,
            "fsdp_no_shard": whole,
            "fsdp_shard_grad_op": passes * whole + whole,
            "fsdp_full_shard": passes * (whole + blocks) + whole,
        }[run.kind]
