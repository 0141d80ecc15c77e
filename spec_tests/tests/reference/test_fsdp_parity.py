"""The reference's fully_shard beside PyTorch's: ten steps, equal in every bit of loss and shard.

No clause asks for it, since no contract names the order of an addition. It holds because both lay
gradients out alike, and it is the strongest sign that nothing is done in another way by accident.
"""

import hashlib
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds

WIDTH, LENGTH = 24, 12
STEPS = 10
POLICIES: dict[str, dict[str, torch.dtype]] = {
    "float32": {},
    "bfloat16-float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


# Of the reference's Llama. The small one has widths that no number of ranks divides.
SMALL = {
    "vocab_size": 50,
    "max_sequence_length": LENGTH,
    "num_layers": 3,
    "num_heads": 4,
    "embedding_dim": WIDTH,
    "ffn_multiplier": 0.75,
    "ffn_multiple_of": 2 * WIDTH + 3,
}


def built(name: str) -> tuple[Any, int]:
    """The model and how many words it knows."""
    kind = importlib.import_module("solution.config").LlamaConfig
    config = kind(**SMALL) if name == "llama-small" else kind.preset("debug")
    return importlib.import_module("solution.models.families").build(config), config.vocab_size


def trained(
    ctx: Context, name: str, policy: dict[str, torch.dtype], setting: bool | None
) -> list[list[str]]:
    """This rank's losses, and digests of its shards of the gradients: every bit counts."""
    torch.manual_seed(7)
    model, vocabulary = built(name)
    model.to(ctx.device)
    options = {
        "reshard_after_forward": setting,
        "mp_policy": ctx.impl.MixedPrecisionPolicy(**policy),
    }
    for block in model.blocks:
        ctx.impl.fully_shard(block, **options)
    ctx.impl.fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(ctx.rank)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(vocabulary, (2, LENGTH + 1), generator=generator).to(ctx.device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        shards = [p.grad.to_local().contiguous() for p in model.parameters()]
        bits = b"".join(bytes(shard.view(torch.uint8).flatten().tolist()) for shard in shards)
        found.append([float(loss).hex(), hashlib.sha256(bits).hexdigest()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "model", ["llama-small", pytest.param("llama-debug", marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_pytorchs_to_the_bit(
    worlds: Worlds, model: str, policy: str, size: int
):
    setting = {2: None, 3: True, 4: False}[size]
    ours, theirs = (
        list(worlds.world(size, parse(impl)).run(trained, model, POLICIES[policy], setting))
        for impl in ("solution", "torch")
    )
    assert ours == theirs
    losses = [float.fromhex(loss) for loss, _ in ours[0]]
    assert len(set(losses)) == STEPS, "it trains, or there would be nothing to compare"
