"""The reference: compact code for data-parallel training that passes the specification.

The public names in the order of a training step: tokens, model, attention, wrapper, optimizer,
loop, checkpoint. Each is one function or class of one file; `solution/README.md` says in which
order to read them. This module satisfies `spec_tests/contract` as it stands.
"""

from solution.attention.flash import FlashAttentionTorch, flash_attention
from solution.attention.triton_launch import FlashAttentionTriton, flash_attention_triton
from solution.checkpoint import load_checkpoint, save_checkpoint
from solution.data.loader import token_loader
from solution.measure.flops import extrapolate_training, flops_per_token, model_flops_utilization
from solution.measure.memory import memory_estimate
from solution.measure.throughput import measure_throughput, sweep_batch_sizes
from solution.measure.trace import summarize_trace
from solution.models.gpt2 import language_model
from solution.parallel import finish_gradient_synchronization, no_sync
from solution.parallel.clip import clip_grad_norm_
from solution.parallel.ddp import DDPBucketed, DDPIndividualParameters, ddp, ddp_bucketed
from solution.parallel.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from solution.parallel.fsdp.api import FullySharded, fsdp, full_parameters
from solution.parallel.zero1 import ShardedOptimizer, full_optimizer_state, sharded_optimizer
from solution.strategies import build_fsdp_trainer, build_trainer, build_zero1_trainer
from solution.trainer import accumulation_steps, train

FlashAttentionFunctionPyTorch = FlashAttentionTorch
"""The name that CS336 gives it."""
