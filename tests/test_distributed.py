"""One training on several processes: the same sums, noise once, and refusals in all of them."""

import math
import warnings

import pytest
import torch
import yaml
from torch import distributed, nn
from torch.nn import functional as F

import dprc
import dprc.processes
from dprc.cli import main
from dprc.distributed import replicate, shard, start
from dprc.distributed.group import digest
from dprc.distributed.replication import ReplicatedTotals
from dprc.losses import causal_lm_loss
from dprc.noise import Stream
from dprc.processes import OneProcess
from dprc.recompute import recompute_blocks
from dprc.sampling import LogicalBatch, deal
from tests import runs
from tests.jobs import alone_in_a_job
from tests.tiny import causal_lm

WAYS = ("replicate", "shard")
JOIN = {"replicate": replicate, "shard": shard, "alone": lambda model: None}
several = pytest.mark.distributed


# --- what is trained ------------------------------------------------------------------------------


class Block(nn.Module):
    """A part: a wide layer, a norm, and odd numbers of rows."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LoraBlock(nn.Module):
    """A part whose layer is frozen, with trained factors of low rank beside it."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.first = nn.Linear(width, 2, bias=False)
        self.second = nn.Linear(2, width, bias=False)

    def forward(self, x):
        return x + self.layer(x) + self.second(self.first(x))


class Bare(nn.Module):
    """A part with a parameter that needs each sample's own copy; as few rows as processes."""

    def __init__(self, width):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale + torch.sin(x + self.shift)


class Stack(nn.Module):
    def __init__(self, *blocks, inputs=8, classes=5, width=12):
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(block(width) for block in blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def seeded(make_fn, *args, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_fn(*args, **options)


MODELS = {
    "blocks": lambda: seeded(Stack, Block, Bare, Block),
    "lora": lambda: seeded(Stack, LoraBlock, LoraBlock),
    "one layer": lambda: seeded(nn.Linear, 8, 5),
    "tied": causal_lm,
    "recomputed": causal_lm,
}


class Rows:
    """Items of made-up numbers, or of made-up token ids."""

    def __init__(self, count, kind="blocks"):
        generator = torch.Generator().manual_seed(1)
        self.texts = kind in ("tied", "recomputed")
        shape = (count, 9) if self.texts else (count, 6, 8)
        numbers = torch.randn(shape, generator=generator)
        self.items = (numbers.abs() * 100).long() % 250 + 3 if self.texts else numbers
        self.labels = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if self.texts:
            return {"input_ids": self.items[index], "labels": self.items[index]}
        return self.items[index], self.labels[index]


def losses_of(model, batch):
    device = next(model.parameters()).device
    if isinstance(batch, dict):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        return causal_lm_loss(model, batch, chunk_tokens=4)
    x, labels = (tensor.to(device) for tensor in batch)
    logits = model(x)
    return F.cross_entropy(logits.mean(1), labels, reduction="none")


OPTIONS = {
    "max_grad_norm": 0.5,
    "noise_multiplier": 0.7,
    "sample_rate": 0.6,
    "expected_batch_size": 8.0,
    "num_probes": 4,
    "privacy_seed": 11,
}


def make_engine(model, processes, *, lr=0.1, **changes):
    trained = [p for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dprc.PrivacyEngine(
            model,
            torch.optim.AdamW(trained, lr=lr) if lr != 1.0 else torch.optim.SGD(trained, lr=lr),
            processes=processes,
            **OPTIONS | changes,
        )


def whole(model):
    """Give all parameters, gathered: by all processes alike."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def take_steps(model, engine, data, *, steps, max_physical_batch=3):
    loader = engine.poisson_loader(data, steps=steps, max_physical_batch=max_physical_batch)
    for logical_batch in loader:
        for batch in logical_batch:
            engine.backward(losses_of(model, batch))
        engine.step()


def trained(way, kind, steps=3, count=14, param_dtype=None, changes=(), device="cpu"):
    """Train; give parameters and what the engine says of itself."""
    model = MODELS[kind]().to(device)
    if kind == "recomputed":
        model.train()
        recompute_blocks(model)
    options = {} if param_dtype is None else {"param_dtype": param_dtype}
    processes = JOIN[way](model, **options)
    engine = make_engine(model, processes, **dict(changes))
    take_steps(model, engine, Rows(count, kind), steps=steps)
    said = {
        "steps": engine.accountant.steps,
        "accountant": engine.accountant.state_dict(),
        "clipped": engine.clipped_samples,
        "plan": engine.plan(),
        "slack": engine._sum._slack,
    }
    engine.detach()
    return whole(model), said


def assert_close(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = float((found[name] - value).abs().max())
        assert error <= tolerance * max(1.0, float(value.abs().max())), (name, error)


# --- pure logic: no process is started ------------------------------------------------------------


class Rank(OneProcess):
    def __init__(self, rank, world_size, in_step):
        self.rank, self.world_size, self.in_step = rank, world_size, in_step


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8, 30])
def test_a_logical_batch_is_dealt_whole_and_evenly(count, in_step):
    drawn = torch.arange(100, 100 + count).numpy()
    shares = [
        deal(drawn, Rank(rank, 3, in_step), step=5, max_physical_batch=2) for rank in range(3)
    ]
    assert sorted(index for share in shares for index in share.indices) == drawn.tolist()
    sizes = [len(share.indices) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert {share.total for share in shares} == {count}
    batches = [-(-size // 2) + share.idle for size, share in zip(sizes, shares, strict=True)]
    if in_step:
        assert len(set(batches)) == 1
        assert batches[0] == -(-max(sizes) // 2)
    else:
        assert all(share.idle == 0 for share in shares)


def test_a_process_without_samples_gets_batches_of_one_item_to_keep_step():
    share = deal(torch.arange(1).numpy(), Rank(1, 2, True), step=0, max_physical_batch=4)
    batch = LogicalBatch(list("abc"), share, max_physical_batch=4, collate_fn=list)
    assert len(batch) == 0
    assert list(batch) == [["a"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_get_their_part_of_the_noise_of_the_whole(dtype):
    """Over the edges of the chunks that noise is made in, and for empty parts."""
    stream, shape = Stream((1, 2)), torch.Size((7, 50_001))
    whole_noise = torch.zeros(shape, dtype=dtype)
    position = dprc.noise.Position(step=3, parameter=1)
    stream.add_normal_(whole_noise, position, deviation=2.0)
    for first, last in ((0, 3), (3, 6), (6, 7), (7, 7)):
        part = torch.zeros(last - first, shape[1], dtype=dtype)
        stream.add_normal_(part, position, deviation=2.0, part=(first * shape[1], shape))
        assert torch.equal(part, whole_noise[first:last])


def test_wrappers_that_add_up_raw_gradients_are_refused_in_one_process_too():
    with pytest.raises(dprc.PrivacyError, match="DataParallel"):
        make_engine(nn.DataParallel(nn.Linear(3, 2)), None)


def test_processes_that_torchrun_did_not_start_are_refused(monkeypatch, tmp_path, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="no RANK; start the processes with `torchrun"):
        start()
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(runs.settings().model_dump()))
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "start the processes with `torchrun" in line


def test_items_are_compared_by_what_is_the_same_in_every_process():
    class Opaque:
        """Written with its address."""

    item = {"ids": torch.arange(3), "name": "a", "more": [Opaque(), 1.5]}
    same = {"ids": torch.arange(3), "name": "a", "more": [Opaque(), 1.5]}
    assert digest(item) == digest(same)
    for change in ({"ids": torch.arange(3) + 1}, {"name": "b"}, {"more": [Opaque(), 2.5]}):
        assert digest(item) != digest(item | change)


def test_a_job_needs_a_process_group():
    with pytest.raises(dprc.PrivacyError, match=r"dprc.distributed.start\(\) first"):
        replicate(nn.Linear(2, 2))


# --- the same training as in one process ----------------------------------------------------------


@several
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_two_processes_learn_what_one_does(two, way, kind):
    expected, said = trained("alone", kind)
    answers = two.ask(trained, way, kind)
    for parameters, told in answers:
        assert_close(parameters, expected)
        assert told == {**told, **said}  # one step each, clipped samples, shapes in the plan
    first, second = (parameters for parameters, _ in answers)
    assert all(torch.equal(first[name], second[name]) for name in first)


def saved_and_loaded(way, kind):
    """Train and save as docs/distributed.md does; give what a plain model then holds."""
    model = MODELS[kind]()
    processes = JOIN[way](model)
    take_steps(model, make_engine(model, processes), Rows(14, kind), steps=1)
    learned = whole(model)
    weights = {name: processes.whole(value) for name, value in model.state_dict().items()}
    if processes.rank > 0:
        return None
    plain = MODELS[kind]()
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 7.0)
    plain.load_state_dict(weights)
    return whole(plain), learned


@several
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["blocks", "tied"])
def test_a_script_saves_the_weights_of_the_plain_model(two, way, kind):
    loaded, learned = two.ask(saved_and_loaded, way, kind)[0]
    assert_close(loaded, learned, tolerance=0.0)
    start = whole(MODELS[kind]())
    assert any(not torch.equal(loaded[name], start[name]) for name in start)


@several
@pytest.mark.parametrize("way", WAYS)
def test_three_processes_learn_what_one_does(three, way):
    """Uneven shares, shards of unequal and of no rows."""
    expected, said = trained("alone", "blocks")
    for parameters, told in three.ask(trained, way, "blocks"):
        assert_close(parameters, expected)
        assert told["clipped"] == said["clipped"] > 0


@several
@pytest.mark.parametrize("way", WAYS)
def test_a_job_of_one_process_learns_what_no_job_does(way, tmp_path):
    expected, _ = trained("alone", "tied")
    with alone_in_a_job("gloo", tmp_path):
        parameters, _ = trained(way, "tied")
    assert_close(parameters, expected)


@several
@pytest.mark.parametrize(
    "changes",
    [
        {"sketch": "shared"},
        {"estimator": "exact"},
        {"estimator": "hutchpp", "head_rank": 2, "num_probes": 26},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_estimators_and_sketches(two, changes):
    expected, _ = trained("alone", "blocks", changes=changes)
    for parameters, _ in two.ask(trained, "shard", "blocks", 3, 14, None, changes):
        assert_close(parameters, expected)


@several
def test_book_keeping_works_on_replicas(two):
    changes = {"schedule": "book_keeping"}
    expected, _ = trained("alone", "blocks", changes=changes)
    for parameters, _ in two.ask(trained, "replicate", "blocks", 3, 14, None, changes):
        assert_close(parameters, expected)


@several
def test_gathered_in_bfloat16_the_bound_has_the_slack_of_it(two):
    changes = {"noise_multiplier": 0.0, "estimator": "exact"}
    expected, _ = trained("alone", "blocks", changes=changes)
    for parameters, told in two.ask(trained, "shard", "blocks", 3, 14, torch.bfloat16, changes):
        assert told["slack"] == 1e-2
        # AdamW moves an entry by the learning rate a step, whichever way rounding turns its sign.
        assert_close(parameters, expected, tolerance=3 * 2 * 0.1)
        near = sum(int((parameters[n] - expected[n]).abs().lt(0.02).sum()) for n in expected) / sum(
            value.numel() for value in expected.values()
        )
        assert near > 0.8


@several
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_items_than_processes(three, way, count):
    changes = {"sample_rate": 1.0}
    expected, _ = trained("alone", "blocks", 2, count, changes=changes)
    for parameters, told in three.ask(trained, way, "blocks", 2, count, None, changes):
        assert_close(parameters, expected)
        assert told["steps"] == 2


# --- noise ----------------------------------------------------------------------------------------


def pure_noise(way, fault=None):
    """Give the parameters after a step without a sample, from zero: minus the scaled noise."""
    model = nn.Sequential(nn.Linear(300, 101), nn.Linear(101, 200, bias=False))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    processes = JOIN[way](model)
    engine = make_engine(model, processes, lr=1.0, sample_rate=1e-9, num_probes=32)
    with pytest.MonkeyPatch.context() as patched:
        if fault is not None:
            fault(patched)
        take_steps(model, engine, Rows(4), steps=1)
    engine.detach()
    return whole(model)


def noise_on_each_process(patched):
    add = dprc.engine.add_gaussian_noise_
    pop = ReplicatedTotals.pop

    def noisy_pop(self, parameter):
        total = dprc.schedules.Totals.pop(self, parameter)
        deviation = OPTIONS["noise_multiplier"] * OPTIONS["max_grad_norm"]
        stream = Stream((distributed.get_rank(), 7))
        add(total, standard_deviation=deviation, stream=stream, step=0, parameter=parameter)
        self._totals[parameter] = total
        return pop(self, parameter)

    patched.setattr(ReplicatedTotals, "pop", noisy_pop)
    patched.setattr(dprc.engine, "add_gaussian_noise_", lambda total, **_: total)


def standardised_variance(parameters):
    """Give how many standard deviations the variance of the noise is from what it should be."""
    numbers = torch.cat([value.flatten() for value in parameters.values()]).double()
    deviation = (
        OPTIONS["noise_multiplier"] * OPTIONS["max_grad_norm"] / OPTIONS["expected_batch_size"]
    )
    return float((numbers / deviation).square().mean() - 1) * math.sqrt(len(numbers) / 2)


@several
@pytest.mark.parametrize("way", WAYS)
def test_noise_is_added_once_in_all(two, way):
    first, second = two.ask(pure_noise, way)
    assert abs(standardised_variance(first)) < 5
    alone = pure_noise("alone")
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, alone[name])  # whatever the way and the number of processes
    wide = first["0.weight"]
    assert not torch.equal(wide[:50], wide[51:101])  # rows of two shards


@several
def test_noise_on_each_process_would_be_noticed(two):
    parameters, _ = two.ask(pure_noise, "replicate", noise_on_each_process)
    assert standardised_variance(parameters) > 50


# --- samples --------------------------------------------------------------------------------------


class Same(Rows):
    """The same item again and again."""

    def __getitem__(self, index):
        return super().__getitem__(0)


def norms_of_equal_samples(way, sketch):
    model = MODELS["blocks"]()
    engine = make_engine(model, JOIN[way](model), sample_rate=1.0, sketch=sketch)
    for logical_batch in engine.poisson_loader(Same(7), steps=1, max_physical_batch=2):
        norms = []
        for batch in logical_batch:
            before = engine._sum.samples
            engine.backward(losses_of(model, batch))
            if engine._sum.samples > before:
                norms += engine.squared_norms.tolist()
        engine.step()
    engine.detach()
    return norms


@several
@pytest.mark.parametrize("way", WAYS)
def test_a_shared_sketch_is_that_of_all_processes_and_a_samples_own_of_none_else(two, way):
    shared = [norm for norms in two.ask(norms_of_equal_samples, way, "shared") for norm in norms]
    assert len(shared) == 7
    assert max(shared) - min(shared) < 1e-4 * max(shared)
    own = [norm for norms in two.ask(norms_of_equal_samples, way, "per_sample") for norm in norms]
    assert len(own) == 7
    gaps = [abs(a - b) for i, a in enumerate(own) for b in own[:i]]
    assert min(gaps) > 1e-3 * max(own)


class Broken(Rows):
    """One item is not finite; another makes the gradient overflow."""

    def __init__(self, count):
        super().__init__(count)
        self.items[3] = math.nan


def with_a_broken_item(way):
    model = MODELS["blocks"]()
    engine = make_engine(model, JOIN[way](model), sample_rate=1.0)
    take_steps(model, engine, Broken(9), steps=2)
    engine.detach()
    return whole(model), engine.excluded_samples


@several
@pytest.mark.parametrize("way", WAYS)
def test_a_sample_that_is_not_finite_derails_nobody(two, way):
    expected, excluded = with_a_broken_item("alone")
    assert excluded == 2
    for parameters, found in two.ask(with_a_broken_item, way):
        assert found == 2
        assert_close(parameters, expected)


# --- going on -------------------------------------------------------------------------------------


def going_on(way, parameters, state, steps):
    model = MODELS["blocks"]()
    if parameters is not None:
        model.load_state_dict(parameters)
    engine = make_engine(model, JOIN[way](model), privacy_seed=None, lr=1.0)
    if state is not None:
        engine.load_state_dict(state)
    take_steps(model, engine, Rows(14), steps=steps)
    state = engine.state_dict()
    engine.detach()
    return whole(model), state


@several
def test_a_run_goes_on_in_any_number_of_processes(two, three):
    """With keys that process 0 drew from the system: the rest of a run is that of one process."""
    answers = two.ask(going_on, "shard", None, None, 2)
    assert answers[0][1] == answers[1][1]
    parameters, state = answers[0]
    assert state["streams"]["releasable"]
    in_three = three.ask(going_on, "replicate", parameters, state, 2)
    alone_parameters, alone = going_on("alone", parameters, state, 2)
    for found, its_state in in_three:
        assert_close(found, alone_parameters)
        assert its_state == alone
    last, state = going_on("alone", *in_three[0], 1)
    sharded_last = two.ask(going_on, "shard", *in_three[0], 1)
    assert state["step_index"] == 5
    assert_close(sharded_last[0][0], last)


# --- refused, by all processes --------------------------------------------------------------------


def mine():
    return distributed.get_rank()


def engine_with(way="replicate", **changes):
    model = MODELS["blocks"]()
    return make_engine(model, JOIN[way](model), **changes)


def other_settings():
    engine_with(max_grad_norm=0.5 + mine())


def other_seeds():
    engine_with(privacy_seed=1234 + mine())


def a_seed_and_none():
    engine_with(privacy_seed=[None, 5][mine()])


def other_shapes(way):
    JOIN[way](Stack(Block, classes=4 + mine()))


def other_names(way):
    model = MODELS["blocks"]()
    if mine() == 1:
        model.extra = nn.Linear(2, 2)
    JOIN[way](model)


def other_values(way):
    torch.manual_seed(mine())
    JOIN[way](Stack(Block))


def other_frozen(way):
    model = MODELS["blocks"]()
    model.head.requires_grad_(mine() == 0)
    JOIN[way](model)


def unknown_processes():
    make_engine(MODELS["blocks"](), None)


def without_processes_later():
    model = MODELS["blocks"]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dprc.processes, "number_of_processes", lambda: 1)
        engine = make_engine(model, None)
    x, labels = Rows(3).items, Rows(3).labels
    engine.backward(losses_of(model, (x, labels)))


def split_by_rank(count):
    data = Rows(count)
    share = torch.utils.data.Subset(data, range(mine(), count, 2))
    engine_with().poisson_loader(share, steps=1, max_physical_batch=2)


def other_physical_batches():
    engine_with().poisson_loader(Rows(4), steps=1, max_physical_batch=2 + mine())


def other_states():
    engine = engine_with(privacy_seed=None)
    state = engine.state_dict()
    state["streams"]["noise"] = [mine(), 0]
    engine_with(privacy_seed=None).load_state_dict(state)


def wrapped_by_ddp():
    make_engine(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), None)


def replicated_inside_ddp():
    replicate(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)))


def wrapped_by_old_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    shard(FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu")))


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    shard(parallelize_module(model, mesh, {"0": ColwiseParallel()}))


def hybrid():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = seeded(nn.Linear, 4, 2)
    processes = shard(model)
    other = nn.Linear(4, 2)
    fully_shard(other, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")))
    processes._model = other
    processes.rest = lambda: None
    make_engine(other, processes)


def sharded_by_hand():
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 2)
    fully_shard(model)
    replicate(model)


def book_keeping_on_shards():
    engine_with("shard", schedule="book_keeping")


def another_model(way):
    processes = JOIN[way](MODELS["blocks"]())
    make_engine(MODELS["blocks"](), processes)


def added_after_sharding():
    model = MODELS["blocks"]()
    processes = shard(model)
    model.more = nn.Linear(2, 2)
    make_engine(model, processes)


def shared_between_parts():
    model = seeded(Stack, Block, Block)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    shard(model)


def a_loop_around_parts():
    model = MODELS["blocks"]()
    model.bare = nn.Parameter(torch.zeros(2, 2))
    make_engine(model, shard(model))


def batches_of_its_own():
    model = MODELS["blocks"]()
    engine = make_engine(model, shard(model))
    x, labels = Rows(3).items, Rows(3).labels
    engine.backward(losses_of(model, (x, labels)))


def batches_left_out():
    model = MODELS["blocks"]()
    engine = make_engine(model, shard(model), sample_rate=1.0)
    for logical_batch in engine.poisson_loader(Rows(8), steps=1, max_physical_batch=2):
        engine.backward(losses_of(model, next(iter(logical_batch))))
        engine.step()


def other_kinds_of_device(way):
    kinds = {"cpu": ["cpu", "GPU"][mine()]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dprc.distributed.group, "kind_of_device", lambda d: kinds[d.type])
        JOIN[way](MODELS["blocks"]())


def loaded_in_one_process():
    model = MODELS["blocks"]()
    engine = make_engine(model, replicate(model))
    if mine() == 1:
        with torch.no_grad():
            model.head.bias.add_(1e-3)
    take_steps(model, engine, Rows(8), steps=1)


def optimizers_that_part():
    model = MODELS["blocks"]()
    engine = make_engine(model, replicate(model), lr=0.1 * (1 + mine()))
    take_steps(model, engine, Rows(8), steps=2)


class Outside(Stack):
    """A weight is used outside its layer in a way that the capture does not see."""

    def forward(self, x):
        return super().forward(x) + self.head.weight.sum()


def an_unseen_use_of_a_shard():
    model = seeded(Outside, Block)
    engine = make_engine(model, shard(model), sample_rate=1.0)
    take_steps(model, engine, Rows(8), steps=1)


REFUSALS = [
    (other_settings, (), "max_grad_norm: differs between processes: 0.5 in process 0, 1.5 in"),
    (other_seeds, (), "privacy_seed: differs between processes. Start"),
    (a_seed_and_none, (), "privacy_seed: differs between processes. Start"),
    (other_states, (), "state: differs between processes. Start"),
    *((other_shapes, (way,), "parameter head.weight: differs") for way in WAYS),
    *((other_names, (way,), "parameter extra.weight: differs") for way in WAYS),
    *((other_values, (way,), "initial value of embed.weight: differs") for way in WAYS),
    *((other_frozen, (way,), "parameter head.weight: differs") for way in WAYS),
    (unknown_processes, (), "runs 2 processes, and the engine knows of 1"),
    (without_processes_later, (), "runs 2 processes, and the engine knows of 1"),
    (split_by_rank, (9,), "dataset: number of items: differs between processes: 5 in process 0, 4"),
    (split_by_rank, (8,), "dataset: first item: differs"),
    (other_physical_batches, (), "max_physical_batch: differs between processes: 2 in process 0"),
    (replicated_inside_ddp, (), r"DistributedDataParallel.*dprc.distributed.replicate\(model\)"),
    (wrapped_by_ddp, (), "runs 2 processes, and the engine knows of 1"),
    (wrapped_by_old_fsdp, (), r"FullyShardedDataParallel.*dprc.distributed.shard\(model\)"),
    (tensor_parallel, (), r"0\.weight: is sharded.*dprc.distributed.shard\(\)"),
    (hybrid, (), r"weight: is laid out as .* over 2 mesh dimension\(s\).*HSDP"),
    (sharded_by_hand, (), r"weight: is sharded"),
    (book_keeping_on_shards, (), "schedule: 'book_keeping' keeps what sharding saves"),
    *((another_model, (way,), "processes: were made for another model") for way in WAYS),
    (added_after_sharding, (), "more.weight: is not sharded"),
    (shared_between_parts, (), "blocks.1.up.weight: is the same parameter as blocks.0.up.weight"),
    (a_loop_around_parts, (), r"model \(FSDPStack\): runs its samples one by one"),
    (batches_of_its_own, (), "poisson_loader: a sharded model needs all processes"),
    (batches_left_out, (), "poisson_loader: a sharded model needs all processes"),
    *((other_kinds_of_device, (way,), "kind of device 0: differs between") for way in WAYS),
    (loaded_in_one_process, (), "head.bias: is not the same in all processes any more"),
    (optimizers_that_part, (), "embed.weight: is not the same in all processes any more"),
    (an_unseen_use_of_a_shard, (), "head.weight: is also used outside its own module"),
]


@several
@pytest.mark.parametrize(
    ("ask_fn", "arguments", "message"),
    REFUSALS,
    ids=[" ".join([fn.__name__, *map(str, args)]) for fn, args, _ in REFUSALS],
)
def test_refused_by_all_processes_with_one_line(two, ask_fn, arguments, message):
    lines = two.refusals(ask_fn, *arguments)
    assert lines[0] == lines[1]
    assert "\n" not in lines[0]
    assert "1234" not in lines[0]  # the seed itself is a secret
    with pytest.raises(dprc.PrivacyError, match=message):
        raise dprc.PrivacyError(lines[0])
