"""The reference's loop: evaluation, whose ranks count; nothing is disturbed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.tests.reference.launch import on_ranks, solution

_GENERATOR = torch.Generator().manual_seed(1)
DATA = [
    tuple(torch.randint(0, 50, (4, 8), generator=_GENERATOR) for _ in range(2)) for _ in range(40)
]


class Draws(nn.Module):
    """Uses the generator in either mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.rand(())


def model(*extra: nn.Module) -> Any:
    """Return an embedding and a layer, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), *extra, nn.Linear(16, 50))


def trained(module: Any = None, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return weights and records of six steps."""
    module = module or model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    sizes = {"steps": 6, "global_batch_size": 8, "micro_batch_size": 4, "max_norm": 1.0}
    records = solution("trainer").train(module, optimizer, DATA, **{**sizes, **options})
    return [p.detach() for p in module.parameters()], records


@on_ranks(1)
def test_an_evaluation_is_a_mean_over_targets_that_count_and_leaves_no_trace(ctx):
    evaluate = solution("trainer").evaluate
    module = model(nn.Dropout(0.5), nn.Dropout(0.5), Draws())
    module[1].eval()  # frozen by its owner: it must not come back in training mode
    module[0].weight.grad = torch.ones_like(module[0].weight)
    state = torch.get_rng_state()
    losses = [evaluate(module, DATA[:n]) for n in (None, None, 3)]
    inputs, targets = DATA[0]
    ragged = targets.clone()
    ragged[:, 2:] = -100
    for none in ([], [(inputs, torch.full_like(targets, -100))]):
        with pytest.raises(ValueError):
            evaluate(module, none)
    ids, wanted = (torch.cat(both) for both in zip((inputs, ragged), DATA[1], strict=True))
    logits = module[4](module[0](ids)).flatten(0, 1)

    whole, again, part = losses
    assert whole == again != part
    assert [m.training for m in module.modules()] == [True, True, False, True, True, True]
    assert module[0].weight.grad.unique().tolist() == [1.0]
    assert module[4].weight.grad is None
    assert torch.equal(state, torch.get_rng_state())
    by_hand = F.cross_entropy(logits, wanted.flatten()).item()
    assert evaluate(module, [(inputs, ragged), DATA[1]]) == pytest.approx(by_hand, abs=1e-6)


@on_ranks(1)
def test_a_loop_refuses_at_the_call_and_keeps_a_tensor_as_rate(ctx):
    """A tensor is what a compiled step reads."""
    steps, module = solution("trainer").training_steps, model()
    sizes = {"global_batch_size": 4, "micro_batch_size": 4}
    rate = torch.tensor(1.0)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=rate)
    for wrong, number in ((module, -1), (nn.ReLU(), 1)):
        with pytest.raises(ValueError):
            steps(wrong, optimizer, DATA, steps=number, **sizes)

    [record] = steps(module, optimizer, DATA, steps=1, lr=lambda step: 0.5, **sizes)
    assert record["lr"] == rate.item() == 0.5
    assert optimizer.param_groups[0]["lr"] is rate


@on_ranks(2)
def test_the_ranks_of_a_step_are_those_of_the_mesh(ctx):
    fully_shard = solution("parallel.fsdp").fully_shard
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "mine"))
    own, parts = model(), model()
    fully_shard(own, mesh=meshes["mine"])
    (sharded, records), (plain, alone) = (trained(each, max_norm=0.5) for each in (own, model()))
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(sharded, plain, strict=True))
    assert [r["tokens"] for r in records] == [r["tokens"] for r in alone]
    for part in parts:
        fully_shard(part)
    with pytest.raises(ValueError, match="of which parts are sharded"):
        trained(parts)
