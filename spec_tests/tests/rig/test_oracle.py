"""The oracle against sums done by hand: it is what nothing else checks."""

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.rig.judge import oracle
from spec_tests.rig.toys import TOYS, Toy


class Scalar(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.idle = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        return factor * self.w * x


@pytest.fixture(autouse=True)
def w(monkeypatch) -> float:
    """The weight at seed 7 of the toy "scalar", which is planted."""
    monkeypatch.setitem(TOYS, "scalar", Toy("scalar", Scalar))
    return oracle.parameters("scalar", 7)["w"].item()


column = torch.tensor


def value(found: torch.Tensor | None) -> float:
    """The one number in it."""
    assert found is not None
    return found.item()


@pytest.mark.parametrize(
    ("batches", "flags", "squares"),
    [
        ([[1.0, 2.0], [3.0]], (), 1 + 4 + 9),  # d/dw of (1w)^2 + (2w)^2 + (3w)^2
        ([[1.0], [1.0]], [{"factor": 2}, {"factor": 3}], 4 + 9),
    ],
    ids=["summed over batches", "flags of their batch"],
)
def test_gradients_are_of_the_sum_of_squares(w, batches, flags, squares: int):
    found = oracle.gradients("scalar", 7, map(column, batches), flags)
    assert value(found["w"]) == 2 * w * squares
    assert found["idle"] is None


def test_training_steps_by_the_gradient_of_each_step_alone_and_with_its_options(w):
    steps = [[column([1.0]), column([1.0])], [column([2.0])]]
    for lr, decay in ((0.125, 0.0), (0.125, 1.0), (0.25, 1.0)):  # an answer for each
        found = oracle.trained("scalar", 7, steps, torch.optim.SGD, lr=lr, weight_decay=decay)
        first = w - lr * (2 * w * 2 + decay * w)
        assert found["w"].item() == first - lr * (2 * first * 4 + decay * first)
        assert found["idle"].item() == oracle.parameters("scalar", 7)["idle"].item()


def test_what_it_returns_is_nobody_elses():
    for read in (oracle.parameters, oracle.buffers):
        first = read("scalar", 7)
        for tensor in first.values():
            assert not tensor.requires_grad
            tensor.add_(100)
        again = read("scalar", 7)
        assert not any(torch.equal(first[name], tensor) for name, tensor in again.items())
    assert list(oracle.buffers("scalar", 7)) == ["count"]


def test_an_answer_is_kept_for_the_same_question_only():
    one = column([1.0])
    first, again = (oracle.gradients("scalar", 7, [one]) for _ in range(2))
    assert again["w"] is first["w"]
    first.clear()  # the mapping is the caller's
    assert again.keys() == oracle.gradients("scalar", 7, [one]).keys()
    others: list[Any] = [(8, [one]), (7, [one, one]), (7, [one], [{"factor": 2}])]
    assert all(oracle.gradients("scalar", *other)["w"] is not again["w"] for other in others)
    oracle.forget()
    assert oracle.gradients("scalar", 7, [one])["w"] is not again["w"]


def test_gradients_are_copies():
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    found = oracle.gradients_of(module)
    module.zero_grad(set_to_none=False)
    assert found["weight"] is not None
    assert torch.equal(found["weight"], torch.ones(1, 2))


def test_none_becomes_zeros_of_the_parameters_kind():
    like = oracle.parameters("scalar", 7)
    found = oracle.zeros_for_none({"w": column([3.0]), "idle": None}, like)
    assert found["w"].item() == 3
    assert value(found["idle"]) == 0
    assert found["idle"].dtype == torch.float32
