"""DTensors on simulated ranks: a tensor-parallel plan trains, redistribution computes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.sim import Schedule

SCHEDULES = [Schedule(), Schedule("reversed"), Schedule("seeded", seed=3, late=2)]
STEPS, BATCH, WIDTH = 3, 4, 8


def sim(worlds: Worlds, size: int = 2) -> World:
    return worlds.world(size, transport="sim")


def two_layers() -> nn.Sequential:
    """Two layers whose values are small integers: sums of them are exact in any order."""
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        values = torch.randint(-2, 3, parameter.shape, generator=generator)
        parameter.data.copy_(values)
    return model.double()


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(-2, 3, (BATCH, WIDTH), generator=generator).double()


def train(model: nn.Module, parts: list[int], share: float) -> list[torch.Tensor]:
    """The weights after some steps of SGD; `share` weighs the loss of each part."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-14)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in parts:
            (share * model(batch(step, part)).square().sum()).backward()
        optimizer.step()
    found = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.append(whole.detach().clone())
    return found


def on_a_mesh(ctx: Context) -> list[torch.Tensor]:
    """Weights split over columns and rows of matrices along one axis, sharded along the other."""
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(two_layers(), mesh["tp"], plan)
    for layer in (model[0], model[2]):  # type: ignore[index]  # a Sequential still
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # fully_shard takes the mean over its axis: twice the loss makes that the sum.
    return train(model, [mesh["dp"].get_local_rank()], 2.0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_tensor_parallel_plan_on_a_2d_mesh_trains_as_one_process(
    worlds: Worlds, schedule: Schedule
):
    ranks = worlds.world(4, transport="sim").scheduled(schedule).run(on_a_mesh)
    expected, start = train(two_layers(), [0, 1], 1.0), list(two_layers().parameters())
    assert not any(torch.equal(one, old) for one, old in zip(expected, start, strict=True))
    for weights in ranks:
        for seen, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-12)


def redistributed(ctx: Context) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    whole = torch.arange(30.0).reshape(6, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    partial = DTensor.from_local(torch.full((2,), float(ctx.rank + 1)), mesh, [Partial()])
    product: Any = rows @ distribute_tensor(whole.T, mesh, [Shard(1)])
    return {
        "gathered": rows.redistribute(placements=[Replicate()]).to_local(),
        "exchanged": rows.redistribute(placements=[Shard(1)]).full_tensor(),
        "reduced": partial.redistribute(placements=[Replicate()]).to_local(),
        "scattered": partial.redistribute(placements=[Shard(0)]).full_tensor(),
        "product": product.full_tensor(),
    }


@pytest.mark.parametrize("size", [2, 3])  # 5 columns are dealt out unevenly to both
def test_dtensor_redistributes_as_one_process_computes(worlds: Worlds, size: int):
    whole = torch.arange(30.0).reshape(6, 5)
    total = torch.full((2,), float(sum(range(1, size + 1))))
    expected = {"gathered": whole, "exchanged": whole, "reduced": total, "scattered": total}
    for seen in worlds.world(size, transport="sim").run(redistributed):
        for name, wanted in {**expected, "product": whole @ whole.T}.items():
            assert torch.equal(seen[name], wanted), name
