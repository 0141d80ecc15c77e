"""The oracle against sums done by hand: it is what nothing else checks."""

import torch
from torch import nn

from spec_tests.rig.judge import oracle
from spec_tests.rig.toys import TOYS, Toy, sum_of_squares


class Scalar(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.idle = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        return factor * self.w * x


def planted(monkeypatch) -> float:
    """The toy "scalar", and its weight at seed 7."""
    monkeypatch.setitem(TOYS, "scalar", Toy("scalar", Scalar))
    return oracle.parameters("scalar", 7)["w"].item()


def value(found: torch.Tensor | None) -> float:
    """The one number in it."""
    assert found is not None
    return found.item()


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_losses_are_summed_over_batches(monkeypatch):
    w = planted(monkeypatch)
    # d/dw of (1w)^2 + (2w)^2 + (3w)^2
    found = oracle.gradients("scalar", 7, [column(1, 2), column(3)])
    assert value(found["w"]) == 2 * w * (1 + 4 + 9)
    assert found["idle"] is None


def test_flags_belong_to_their_batch(monkeypatch):
    w = planted(monkeypatch)
    found = oracle.gradients("scalar", 7, [column(1), column(1)], [{"factor": 2}, {"factor": 3}])
    assert value(found["w"]) == 2 * w * (4 + 9)


def test_training_steps_by_the_gradient_of_each_step_alone(monkeypatch):
    w = planted(monkeypatch)
    steps = [[column(1), column(1)], [column(2)]]
    found = oracle.trained("scalar", 7, steps, lr=0.125)
    first = w - 0.125 * 2 * w * 2
    assert found["w"].item() == first - 0.125 * 2 * first * 4
    assert found["idle"].item() == oracle.parameters("scalar", 7)["idle"].item()


def test_other_optimizers_get_their_options(monkeypatch):
    w = planted(monkeypatch)
    found = oracle.trained("scalar", 7, [[column(1)]], torch.optim.SGD, lr=0.5, weight_decay=1.0)
    assert found["w"].item() == w - 0.5 * (2 * w + w)


def test_what_it_returns_is_nobody_elses(monkeypatch):
    planted(monkeypatch)
    for read in (oracle.parameters, oracle.buffers):
        first = read("scalar", 7)
        for tensor in first.values():
            assert not tensor.requires_grad
            tensor.add_(100)
        assert not any(
            torch.equal(first[name], tensor) for name, tensor in read("scalar", 7).items()
        )
    assert list(oracle.buffers("scalar", 7)) == ["count"]


def test_an_answer_is_kept_for_the_same_question_only(monkeypatch):
    planted(monkeypatch)
    first = oracle.gradients("scalar", 7, [column(1)])
    again = oracle.gradients("scalar", 7, [column(1)])
    assert again["w"] is first["w"]
    first.clear()  # the mapping is the caller's
    assert again.keys() == oracle.gradients("scalar", 7, [column(1)]).keys()
    others = [
        oracle.gradients("scalar", 8, [column(1)]),
        oracle.gradients("scalar", 7, [column(1), column(1)]),
        oracle.gradients("scalar", 7, [column(1)], [{"factor": 2}]),
    ]
    assert all(other["w"] is not again["w"] for other in others)
    oracle.forget()
    assert oracle.gradients("scalar", 7, [column(1)])["w"] is not again["w"]


def test_training_is_kept_for_the_same_options_only(monkeypatch):
    planted(monkeypatch)
    slow, fast = (oracle.trained("scalar", 7, [[column(1)]], lr=lr) for lr in (0.25, 0.5))
    assert slow["w"].item() != fast["w"].item()


def test_gradients_are_copies():
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    found = oracle.gradients_of(module)
    module.zero_grad(set_to_none=False)
    assert found["weight"] is not None
    assert torch.equal(found["weight"], torch.ones(1, 2))


def test_none_becomes_zeros_of_the_parameters_kind(monkeypatch):
    planted(monkeypatch)
    like = oracle.parameters("scalar", 7)
    found = oracle.zeros_for_none({"w": column(3), "idle": None}, like)
    assert found["w"].item() == 3
    assert value(found["idle"]) == 0
    assert found["idle"].dtype == torch.float32


def test_the_loss_is_a_sum_of_squares_in_float64():
    loss = sum_of_squares(torch.tensor([3.0, 4.0]))
    assert loss.item() == 25
    assert loss.dtype == torch.float64
