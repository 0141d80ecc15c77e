"""Half precision and evaluation in the reference's loop: scales, overflows, nothing disturbed."""

import json

import pytest

from spec_tests.reference_tests.launch import answer, run_ranks

PROGRAM = """
import json

import torch
import torch.nn.functional as F
from torch import nn

from solution.evaluate import evaluate
from solution.precision import Precision
from solution.trainer import NonFiniteError, train

generator = torch.Generator().manual_seed(1)
DATA = [
    tuple(torch.randint(0, 50, (4, 8), generator=generator) for _ in range(2)) for _ in range(40)
]


class Draws(nn.Module):
    # Uses the generator in either mode.
    def forward(self, x):
        return x + 0 * torch.rand(())


def model(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), *extra, nn.Linear(16, 50))


def trained(precision, steps=6, **kwargs):
    module = model()
    records = train(
        module, torch.optim.SGD(module.parameters(), lr=0.5), DATA, steps=steps,
        global_batch_size=8, micro_batch_size=4, max_norm=1.0, precision=precision, **kwargs,
    )
    return [p.detach() for p in module.parameters()], records


def scales():
    # The same pattern of overflows to PyTorch's scaler and to ours.
    weight = nn.Parameter(torch.zeros(1))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    ours = Precision("fp16", initial_scale=2.0**20, growth_interval=3)
    optimizer, pairs = torch.optim.SGD([weight], lr=0.0), []
    for _ in range(200):
        is_overflow = bool(torch.rand((), generator=generator) < 0.2)
        weight.grad = torch.tensor([torch.inf if is_overflow else 1.0])
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.back_off() if is_overflow else ours.updated()
        pairs.append((theirs.get_scale(), ours.scale))
    return all(a == b for a, b in pairs) and len({a for a, _ in pairs}) > 5


def overflow():
    # A scale that is far too large costs time, and neither data nor a bit of the weights.
    high, low = Precision("fp16", initial_scale=2.0**40), None
    weights, records = trained(high)
    low = Precision("fp16", initial_scale=records[0]["scale"])
    expected, plain = trained(low)
    return {
        "skipped": records[0]["skipped"],
        "equal": all(map(torch.equal, weights, expected)),
        "losses": [r["loss"] for r in records] == [r["loss"] for r in plain],
        "scale": records[0]["scale"],
        "rates": trained("fp16", lr=lambda step: 0.1 / (step + 1))[1][-1]["lr"],
    }


def resumed():
    state = Precision("fp16", initial_scale=2.0**10)
    for _ in range(5):
        state.updated()
    other = Precision("fp16")
    other.load_state_dict(state.state_dict())
    return other.state_dict() == state.state_dict()


def not_finite():
    module = model()
    with torch.no_grad():
        module[1].weight[0, 0] = torch.nan
    before = [p.clone() for p in module.parameters()]
    try:
        train(module, torch.optim.SGD(module.parameters(), lr=0.5), DATA, steps=1,
              global_batch_size=4, micro_batch_size=4, precision="fp16")
    except NonFiniteError:
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num())
                   for a, b in zip(before, module.parameters()))
        return same and all(p.grad is None for p in module.parameters())


def evaluation():
    module = model(nn.Dropout(0.5), nn.Dropout(0.5), Draws())
    module[1].eval()  # frozen by its owner: it must not come back in training mode
    module[0].weight.grad = torch.ones_like(module[0].weight)
    state = torch.get_rng_state()
    losses = [evaluate(module, DATA, max_batches=n) for n in (None, None, 3)]
    ragged = [(DATA[0][0], DATA[0][1].clone()), DATA[1]]
    ragged[0][1][:, 2:] = -100
    means, counts = [evaluate(module, [batch]) for batch in ragged], [8, 32]
    weighted = sum(m * n for m, n in zip(means, counts)) / sum(counts)
    refused = 0
    for batches in ([], [(DATA[0][0], torch.full_like(DATA[0][1], -100))]):
        try:
            evaluate(module, batches)
        except ValueError:
            refused += 1
    inputs, targets = DATA[0]
    by_hand = F.cross_entropy(module[4](module[0](inputs)).flatten(0, 1), targets.flatten()).item()
    return {
        "value": abs(evaluate(module, DATA[:1]) - by_hand) < 1e-6,
        "same": losses[0] == losses[1] != losses[2],
        "modes": [m.training for m in module.modules()],
        "gradient": bool((module[0].weight.grad == 1).all()) and module[4].weight.grad is None,
        "random": torch.equal(state, torch.get_rng_state()),
        "weighted": abs(evaluate(module, ragged) - weighted) < 1e-6,
        "refused": refused,
    }


print(json.dumps({
    "scales": scales(), "overflow": overflow(), "resumed": resumed(),
    "not_finite": not_finite(), "evaluation": evaluation(),
    "dtypes": sorted({str(p.dtype) for p in trained("bf16")[0]}),
}))
"""

# One rank overflows, and nothing carries its infinity to the other: both must drop the update.
RANKS = """
import json

import torch
from torch import nn

from solution.evaluate import evaluate
from solution.precision import Precision
from solution.trainer import train
from solution.world import distributed


class Alone(nn.Module):
    # Says that it averages, and does not.
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids)

    def finish_gradient_synchronization(self):
        pass


with distributed(device="cpu", timeout_s=30) as world:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    limit = 2.0**12 if world.rank == 1 else torch.inf
    precision = Precision("fp16", initial_scale=2.0**16)
    module[1].bias.register_hook(lambda g: g * torch.inf if precision.scale > limit else g)
    ids = torch.arange(8).reshape(2, 4)
    batch = (ids, ids + 1)
    records = train(
        Alone(module), torch.optim.SGD(module.parameters(), lr=0.5), [batch] * 2, steps=2,
        global_batch_size=4, micro_batch_size=2, precision=precision,
    )
    loss = evaluate(Alone(module), [batch] * 3)
    uneven = ""
    try:
        evaluate(Alone(module), [batch] * (2 + world.rank))
    except ValueError as error:
        uneven = str(error)
    print(json.dumps({
        "skipped": [r["skipped"] for r in records], "scale": precision.scale,
        "loss": loss, "uneven": uneven,
    }))
"""


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    return answer(PROGRAM, folder=tmp_path_factory.mktemp("precision"))


def test_the_loss_scale_goes_the_way_of_pytorchs(found):
    assert found["scales"]
    assert found["resumed"]


def test_an_overflow_costs_no_data_and_no_bit(found):
    overflow = found["overflow"]

    assert overflow["skipped"] > 0
    assert overflow["scale"] == 2.0 ** (40 - overflow["skipped"])
    assert overflow["equal"]
    assert overflow["losses"]
    assert overflow["rates"] == pytest.approx(0.1 / 6)


def test_what_no_scale_can_cure_raises_and_updates_nothing(found):
    assert found["not_finite"] is True


def test_weights_stay_in_float32(found):
    assert found["dtypes"] == ["torch.float32"]


def test_an_evaluation_leaves_no_trace(found):
    evaluation = found["evaluation"]

    assert evaluation["same"]
    assert evaluation["modes"] == [True, True, False, True, True, True]
    assert evaluation["gradient"]
    assert evaluation["random"]


def test_an_evaluation_is_a_mean_over_targets_that_count(found):
    assert found["evaluation"]["value"]
    assert found["evaluation"]["weighted"]
    assert found["evaluation"]["refused"] == 2


def test_ranks_drop_an_update_together_and_evaluate_together(tmp_path):
    ended = run_ranks(RANKS, num_ranks=2, folder=tmp_path)

    assert [one.status for one in ended] == [0, 0], ended
    ranks = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert [rank["skipped"] for rank in ranks] == [[4, 0], [4, 0]]
    assert [rank["scale"] for rank in ranks] == [4096.0, 4096.0]
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert all("only 1 of 2" in rank["uneven"] for rank in ranks)
