"""`python -m solution.train_fsdp`; and what docstrings of the sharding alone promise."""

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD

from spec_tests.tests.reference import training
from spec_tests.tests.reference.launch import on_ranks, run_ranks
from spec_tests.tests.reference.training import FSDP, SMALL, summary, weights

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def trained(data, folder, *flags):
    """Two ranks' worth of steps."""
    run_ranks(FSDP, *SMALL, "--data", data, "--out", folder, *flags, folder=folder)


def steps(folder, name="baseline"):
    """Loss and gradient norm of each step, to the bit."""
    return [(line["loss"], line["grad_norm"]) for line in training.steps(folder, name)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_changes_nothing_but_rounding(data, baseline, tmp_path, strategy):
    name = f"fsdp_{strategy.lower()}"

    trained(data, tmp_path, "--strategy", strategy)

    for found, wanted in zip(steps(tmp_path, name), steps(baseline), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    first, second = weights(tmp_path, name)
    assert first == second
    told = summary(tmp_path, f"{name}.rank0")
    held, whole = told["held_bytes"], told["parameter_bytes"]
    share = 1 if strategy == "NO_SHARD" else 0.5
    for component, copies in (("parameters", 1), ("optimizer", 2)):
        # Rows that do not divide, and AdamW's count of steps, in a model of some kilobytes.
        assert held[component] == pytest.approx(share * copies * whole, rel=0.05), component


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("fsdp_full_shard", ("--model", "llama", "--param-dtype", "bfloat16")),
        (
            "fsdp_shard_grad_op_kept",
            ("--strategy", "SHARD_GRAD_OP", "--no-reshard-after-backward", "--max-norm", 1),
        ),
        ("fsdp_no_shard_reduce_grads", ("--strategy", "NO_SHARD", "--reduce-grads")),
    ],
    ids=["bfloat16", "kept", "replicated"],
)
def test_both_implementations_give_the_same_bits(data, tmp_path, name, flags):
    for impl in ("solution", "torch"):
        trained(data, tmp_path, "--impl", impl, *flags)

    assert steps(tmp_path, name) == steps(tmp_path, f"{name}_torch")
    assert weights(tmp_path, name) == weights(tmp_path, f"{name}_torch")
    told = [summary(tmp_path, f"{each}.rank0") for each in (name, f"{name}_torch")]
    for one in told:
        # Of any dtype: gathers in bfloat16 count beside reductions in float32.
        assert ("gather" in " ".join(one["collectives"])) or "no_shard" in name
    assert "no_shard" in name or told[0]["bytes_per_step"] == told[1]["bytes_per_step"]


@pytest.mark.parametrize(
    "flags",
    [("--strategy", "HALF_SHARD"), ("--impl", "other"), ("--param-dtype", "float8")],
    ids=lambda flags: flags[0][2:],
)
def test_an_unknown_word_is_refused_by_name(data, tmp_path, flags):
    training.trained(data, tmp_path, *flags, module=FSDP, status=2, says=flags[1])


@on_ranks(2)
def test_any_error_of_one_rank_is_one_of_all(ctx):
    """A function of the caller's raises on the last rank alone."""

    def placement(parameter):
        if ctx.rank == ctx.world_size - 1:
            raise KeyError("no such placement")

    with pytest.raises((ValueError, KeyError)[ctx.rank]):
        ctx.impl.fully_shard(nn.Linear(4, 4), shard_placement_fn=placement)


@on_ranks(2)
def test_full_parameters_are_copies(ctx):
    api: Any = importlib.import_module("solution.parallel.fsdp.api")
    whole = api.fsdp(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    before = api.full_parameters(whole)
    kept = {name: value.clone() for name, value in before.items()}
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


@on_ranks(2)
def test_a_unit_with_a_linear_is_gathered_in_backward(ctx):
    table: Any = nn.Embedding(4, 2)
    ctx.impl.fully_shard([table, nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="Embedding"):
        table.set_unshard_in_backward(False)


class Table(nn.Module):
    """Returns its own Parameter, as a head asks for that is tied by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self) -> torch.Tensor:
        return self.weight


@on_ranks(2)
def test_a_returned_parameter_gets_no_hooks_and_classes_go_with_their_models(ctx):
    model: Any = ctx.impl.fully_shard(Table(), reshard_after_forward=False)
    for _ in range(3):
        model().sum().backward()
    full = model._fsdp_unit.parameters[0].unsharded
    assert not full._backward_hooks
    sharded_class = weakref.ref(type(model))
    del model, full
    gc.collect()
    assert sharded_class() is None


@on_ranks(2)
def test_a_refused_load_can_be_repeated_and_a_tied_one_by_either_name(ctx):
    """Ones are loaded after tensors that are not sharded, or not by rows."""
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    ctx.impl.fully_shard(model)
    right = {"1.weight": torch.ones_like(model[1].weight)}  # the second name of a tied one
    mesh = model[0].weight.device_mesh
    for wrong in (torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])):
        model.load_state_dict({"0.weight": wrong}, assign=True, strict=False)
        with pytest.raises(ValueError, match=r"'0.weight' to stay a DTensor of .*discarded"):
            model.state_dict()
    model.load_state_dict(right, assign=True, strict=False)
    assert float(model(torch.ones(1, 4)).sum()) == 64.0


class Holder(nn.Module):
    """A model with a child of the name that wrappers give to theirs."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


@on_ranks(2)
def test_a_sharded_model_with_a_child_called_module_is_no_wrapper(ctx, tmp_path):
    model, fresh = (ctx.impl.fully_shard(Holder()) for _ in range(2))
    runs = {name: SGD(each.parameters(), 0.1) for name, each in (("old", model), ("new", fresh))}
    ctx.impl.save_checkpoint(tmp_path, step=1, model=model, optimizer=runs["old"])
    ctx.impl.load_checkpoint(tmp_path, model=fresh, optimizer=runs["new"])
    pairs = zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    assert all(torch.equal(old.to_local(), new.to_local()) for old, new in pairs)
