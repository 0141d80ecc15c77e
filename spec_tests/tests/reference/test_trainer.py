"""The reference's loop: evaluation, whose ranks count; nothing is disturbed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.impls import parse
from spec_tests.tests.reference.launch import solution

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


def not_finite(ctx):
    """Whether weights with a NaN are as they were, and without gradients, when training raises."""
    module = model()
    with torch.no_grad():
        module[1].weight[0, 0] = torch.nan
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(solution("trainer").NonFiniteError):
        trained(module, steps=1)
    pairs = zip(before.values(), module.parameters(), strict=True)
    is_equal = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    return is_equal and all(p.grad is None for p in module.parameters())


def test_what_is_not_finite_raises_and_updates_nothing(in_rank):
    assert in_rank(not_finite)


def evaluated(ctx):
    """What an evaluation returns, and what it leaves behind."""
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
    return {
        "losses": losses,
        "modes": [m.training for m in module.modules()],
        "gradients": (module[0].weight.grad.unique().tolist(), module[4].weight.grad),
        "is_random_untouched": torch.equal(state, torch.get_rng_state()),
        "value": evaluate(module, [(inputs, ragged), DATA[1]]),
        "by_hand": F.cross_entropy(logits, wanted.flatten()).item(),
    }


def test_an_evaluation_is_a_mean_over_targets_that_count_and_leaves_no_trace(in_rank):
    found = in_rank(evaluated)

    whole, again, part = found["losses"]
    assert whole == again != part
    assert found["modes"] == [True, True, False, True, True, True]
    assert found["gradients"] == ([1.0], None)
    assert found["is_random_untouched"]
    assert found["value"] == pytest.approx(found["by_hand"], abs=1e-6)


def in_meshes(ctx):
    """Weights and tokens of a mesh per rank, of a plain model, and what parts alone raise."""
    fully_shard = solution("parallel.fsdp").fully_shard
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "mine"))
    own, parts = model(), model()
    fully_shard(own, mesh=meshes["mine"])
    found = [trained(module, max_norm=0.5) for module in (own, model())]
    weights = [[getattr(w, "full_tensor", lambda w=w: w)() for w in ws] for ws, _ in found]
    for part in parts:
        fully_shard(part)
    with pytest.raises(ValueError, match="of which parts are sharded"):
        trained(parts)
    still, _ = trained(max_norm=0.0)
    return weights, [[r["tokens"] for r in records] for _, records in found], still


def test_the_ranks_of_a_step_are_those_of_the_mesh(worlds):
    for (own, plain), (tokens, alone), still in worlds.world(2, parse("solution")).run(in_meshes):
        assert all(map(torch.equal, own, plain))
        assert tokens == alone
        assert all(map(torch.equal, still, (p.detach() for p in model().parameters())))


def asked_for(ctx):
    """The steps for which a schedule was asked, by an optimizer of two groups."""
    module = model()
    asked: list[int] = []

    def rate(finished: int) -> float:
        asked.append(finished)
        return 0.1

    groups = [{"params": [p]} for p in module.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    sizes = {"steps": 3, "global_batch_size": 4, "micro_batch_size": 4}
    solution("trainer").train(module, optimizer, DATA, lr=rate, **sizes)
    return asked


def test_a_schedule_is_asked_once_for_each_step(in_rank):
    assert in_rank(asked_for) == [0, 1, 2]
