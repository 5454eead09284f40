"""Where the backward pass is cut: everything below passes the edge, everything above once."""

import pytest
import torch
from torch import nn

import dprc
from dprc.cut import find_cut
from tests import zoo
from tests.test_capture import check
from tests.test_engine import assert_same, make_engine, released_sum
from tests.truth import clipped_sum, per_sample_gradients, perturb_, squared_norms

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
    edge = cut_of(model, losses).edge
    engine._sum.by_sample = lambda path, tensor: tensor
    engine._sum.receive = lambda parameter, contribution: None
    engine._sum.observe = note("whole")
    (at_edge,) = torch.autograd.grad(losses.sum(), edge, retain_graph=True)
    above = set(seen)
    torch.autograd.backward(losses.sum(), retain_graph=True)
    engine._sum.observe = note("below")
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


class Stacked(nn.Module):
    """Three branches on an axis of their own, as long as the batch by chance."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(torch.stack([b(x).tanh() for b in self.branches]).mean(0))


class SequenceFirst(nn.Module):
    """Layers that see samples first, and a residual stream that has tokens first."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = self.embed(x).transpose(0, 1)
        h = h + self.mix(h.transpose(0, 1)).tanh().transpose(0, 1)
        return self.head(h.transpose(0, 1))


class TokenMajor(SequenceFirst):
    """The same with tokens and samples merged, tokens first."""

    def forward(self, x):
        batch, tokens, _ = x.shape
        h = self.embed(x).transpose(0, 1).reshape(tokens * batch, 5)
        mixed = self.mix(h.view(tokens, batch, 5).transpose(0, 1)).tanh()
        h = h + mixed.transpose(0, 1).reshape(tokens * batch, 5)
        return self.head(h.view(tokens, batch, 5).transpose(0, 1))


class Views(nn.Module):
    """Two views of each sample, one below the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        both = torch.cat([self.left(x[:, 0]), self.right(x[:, 1])])
        left, right = (both / (1 + both.square().sum(1, keepdim=True))).chunk(2)
        return left - right


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Stacked, [(3, 6)]),
        (Stacked, [(4, 6), (3, 6)]),  # the first batch shows nothing
        (SequenceFirst, [(4, 4, 6)]),
        (SequenceFirst, [(4, 3, 6), (4, 4, 6)]),
        (TokenMajor, [(2, 4, 6)]),
        (TokenMajor, [(3, 4, 6)]),
        (Views, [(5, 2, 6)]),
    ],
)
def test_another_axis_is_not_taken_for_the_samples(kind, shapes):
    model = perturb_(kind()).double()
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def losses(x):
        # Norms far apart: a clip factor in the wrong row shows.
        weights = 10.0 ** torch.arange(-2, 2 * len(x) - 2, 2, dtype=torch.float64)
        return model(x).exp().flatten(1).sum(1) * weights

    truth = per_sample_gradients(model, losses(inputs[-1]))
    engine = make_engine(model, max_grad_norm=0.5)
    for x in inputs[:-1]:
        engine.backward(losses(x))
        engine._sum.forget()
    got = released_sum(engine, lambda e: e.backward(losses(inputs[-1])))
    assert_same(got, clipped_sum(truth, squared_norms(truth).sqrt(), 0.5))


def test_a_hook_that_normalises_gradients_is_refused_where_two_passes_need_the_same():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x):
            h = self.a(x)
            if h.requires_grad:
                h.register_hook(lambda g: g / g.norm(dim=-1, keepdim=True))
            return self.b(h)

    x = torch.randn(3, 7, 6)
    for schedule in ("two_pass", "book_keeping"):
        model = Normalised()
        engine = make_engine(model, schedule=schedule)
        losses = model(x).square().flatten(1).sum(1)
        if schedule == "book_keeping":
            engine.backward(losses)
            continue
        with pytest.raises(dprc.PrivacyError, match="half a sample's loss has not half its grad"):
            engine.backward(losses)
