"""Where the backward pass is cut: everything below passes the edge, everything above once."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

import dprc
from dprc.cut import find_cut
from tests import zoo
from tests.test_capture import check
from tests.test_engine import make_engine

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")


class Counted(torch.autograd.Function):
    """Identity that counts how often gradients come back through it."""

    times = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grads):
        Counted.times += 1
        return grads


def counted_losses(model, inputs):
    output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return Counted.apply(output.logits).square().flatten(1).sum(1)


def cut_of(model, losses):
    tokens = zoo.TOKENS
    return find_cut(losses, (len(losses), len(losses) * tokens))


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "gpt2", "lora", "lora_all", "gemma2", "opt"]
)
def test_head_and_loss_are_gone_through_once(name):
    model = zoo.build(name)
    engine = make_engine(model)
    for _ in range(2):  # the first batch is also followed sample by sample
        Counted.times = 0
        engine.backward(counted_losses(model, zoo.batch()))
    assert Counted.times == 1
    engine.detach()


@pytest.mark.parametrize("name", [*zoo.MODELS, "gemma2", "t5", "vit"])
def test_the_gradient_below_is_that_of_the_whole(name):
    model, inputs = zoo.build(name), zoo.batch()
    engine = make_engine(model)
    seen = {}

    def note(kind):
        def take(path, grads):
            seen.setdefault(path, {})[kind] = grads

        return take

    losses = zoo.losses(model, inputs)
    edge = cut_of(model, losses)
    assert isinstance(edge, GradientEdge)
    engine.by_sample = lambda path, tensor: tensor
    engine.receive = lambda parameter, contribution: None
    engine.observe = note("whole")
    (at_edge,) = torch.autograd.grad(losses.sum(), edge, retain_graph=True)
    above = set(seen)
    torch.autograd.backward(losses.sum(), retain_graph=True)
    engine.observe = note("below")
    torch.autograd.backward(edge, at_edge)
    assert {path for path, grads in seen.items() if "below" not in grads} == above
    for path in set(seen) - above:
        torch.testing.assert_close(seen[path]["below"], seen[path]["whole"], rtol=0, atol=0)
    engine.detach()


class Branches(nn.Module):
    """Two heads on one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.left(h), self.right(h)


def two_heads(model):
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, right = model(x)
    return left.square().flatten(1).sum(1) + right.exp().flatten(1).sum(1)


def test_two_heads_are_not_kept_and_still_right():
    model = Branches().double()
    engine = make_engine(model)
    assert cut_of(model, two_heads(model)) is None
    engine.detach()
    check(model, two_heads)


def test_a_parameter_in_the_loss_itself_is_still_refused():
    model, inputs = zoo.build("llama"), zoo.batch()
    engine = make_engine(model)
    penalty = model.model.layers[0].mlp.up_proj._parameters["weight"].norm()
    with pytest.raises(dprc.PrivacyError, match="used outside its own module"):
        engine.backward(zoo.losses(model, inputs) + penalty)


def test_a_sample_that_is_not_finite_leaves_nothing_below_the_cut():
    model, inputs = zoo.build("llama"), zoo.batch()
    engine = make_engine(model)
    losses = zoo.losses(model, inputs) * torch.tensor([1.0, float("inf"), 1.0])
    engine.backward(losses)
    engine.step()
    assert engine.excluded_samples == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
