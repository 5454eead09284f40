"""Learning rates against their formulas written out; optimizers against torch's own updates."""

import math

import pytest
import torch

from dprc.optimization import make_optimizer, make_scheduler
from dprc.settings import TrainingSettings


def training(**changes):
    raw = {"sample_rate": 0.1, "steps": 6, "learning_rate": 1.0, "warmup_steps": 2}
    return TrainingSettings.model_validate(raw | changes)


def rates(settings):
    model = torch.nn.Linear(1, 1)
    optimizer = make_optimizer(model, settings)
    scheduler, seen = make_scheduler(optimizer, settings), []
    for _ in range(settings.steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        # (1 + cos(π·t))/2 at t = 0, 1/4, 1/2, 3/4
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2]),
    ],
)
def test_rates_warm_up_and_then_follow_their_schedule(schedule, expected):
    assert rates(training(schedule=schedule)) == pytest.approx(expected)


def test_a_run_may_be_all_warm_up():
    assert rates(training(steps=2, schedule="cosine")) == [0.5, 1.0]


def test_without_warm_up_the_first_rate_is_the_whole_one():
    assert rates(training(warmup_steps=0, steps=2, schedule="linear")) == [1.0, 0.5]


def test_momentum_carries_the_gradient_on():
    model = torch.nn.Linear(1, 1, bias=False)
    settings = training(optimizer="sgd", momentum=0.5, learning_rate=0.1)
    optimizer, start = make_optimizer(model, settings), float(model.weight.detach())
    for gradient in (1.0, 0.0):
        model.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(start - 0.1 * (1 + 0.5))


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = make_optimizer(model, training(weight_decay=0.1)).param_groups
    assert [id(p) for p in group["params"]] == [id(model.weight)]
    assert group["weight_decay"] == 0.1
