"""DeepSpeed stage 2, which divides gradients as well, behind the contract of a trainer as zero1."""

import functools

from spec_tests.impls.deepspeed import DeepSpeedTrainer

build_zero1_trainer = functools.partial(DeepSpeedTrainer, 2)
