"""What runs otherwise on a GPU: products, sketches, noise, the engine, and the measurements."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dprc
from dprc import estimators
from dprc.losses import causal_lm_loss
from dprc.noise import Position, Stream, add_gaussian_noise_
from dprc.profiling.device import Nvml, check_occupancy, measure_peak
from dprc.profiling.flops import LayerShape
from dprc.profiling.latency import profile_layer
from dprc.recompute import recompute_blocks
from tests.jobs import alone_in_a_job
from tests.test_distributed import WAYS, assert_close, trained
from tests.truth import clipped_sum, per_sample_gradients, squared_norms

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:privacy_seed")]
DTYPES = (torch.float32, torch.bfloat16)


def layer(dtype, *, batch=3, tokens=300, d=96, p=160):
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(batch, tokens, side, generator=generator).to(dtype) for side in (d, p))
    truth = (a.double().transpose(1, 2) @ g.double()).flatten(1).square().sum(1)
    return a.to(DEVICE), g.to(DEVICE), truth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exact", "tiled", "ghost"])
def test_exact_norms_are_those_of_float64(name, dtype):
    # With TF32 products the error would be a thousand times this.
    activations, grads, truth = layer(dtype)
    found = estimators.get(name).squared_norm(activations, grads)
    assert found.device.type == DEVICE.type
    torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hutchinson", "hutchpp"])
def test_estimates_scatter_around_the_truth_as_theory_says(name, dtype):
    activations, grads, truth = layer(dtype, batch=1)
    copies, k = 400, 16
    found = estimators.get(name, num_probes=k).squared_norm(
        activations.expand(copies, -1, -1),
        grads.expand(copies, -1, -1),
        torch.Generator().manual_seed(0),
    )
    ratios = found.cpu().double() / truth
    most = (2 / k) ** 0.5
    assert abs(float(ratios.mean()) - 1) < 5 * most / copies**0.5
    assert 0 < float(ratios.std()) < most
    assert ratios.unique().numel() == copies


def test_noise_has_its_deviation_and_depends_on_its_place_alone():
    stream = Stream((1, 2))

    def noise(step):
        total = torch.zeros(300, 400, device=DEVICE)
        return add_gaussian_noise_(
            total, standard_deviation=3.0, stream=stream, step=step, parameter=0
        )

    first = noise(0)
    count = first.numel()
    assert abs(float(first.mean())) < 5 * 3 / count**0.5
    assert abs(float(first.std()) / 3 - 1) < 5 / (2 * count) ** 0.5
    assert torch.equal(first, noise(0))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), noise(1).flatten()]))[0, 1])) < (
        5 / count**0.5
    )
    sketch = stream.normal((5, 5), Position(role=1), device=DEVICE)
    assert sketch.device.type == DEVICE.type


def small_llama(dtype=torch.float32, *, checkpointing=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(DEVICE, dtype)
    if checkpointing:
        recompute_blocks(model)
        model.train()
    return model


def small_batch():
    ids = torch.randint(80, (4, 50), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def make_engine(model, **options):
    chosen = {
        "max_grad_norm": 0.3,
        "noise_multiplier": 0.0,
        "sample_rate": 0.1,
        "expected_batch_size": 1,
        "privacy_seed": 0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return dprc.PrivacyEngine(model, optimizer, **(chosen | options))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
def test_the_clipped_sum_is_that_of_brute_force(schedule, checkpointing):
    batch, bound = small_batch(), 0.3
    model = small_llama()
    gradients = per_sample_gradients(model, causal_lm_loss(model, batch))
    norms = squared_norms(gradients).sqrt()
    expected = clipped_sum(gradients, norms, bound)

    model = small_llama(checkpointing=checkpointing)
    engine = make_engine(model, estimator="exact", schedule=schedule, max_grad_norm=bound)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    engine.backward(causal_lm_loss(model, batch, chunk_tokens=16))
    torch.testing.assert_close(engine.squared_norms.sqrt().double(), norms, rtol=1e-4, atol=0)
    engine.step()
    for name, parameter in model.named_parameters():
        released = before[name] - parameter.detach().double()
        torch.testing.assert_close(released, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
@pytest.mark.parametrize("estimator", ["exact", "hutchinson", "hutchpp"])
def test_private_steps_in_bfloat16_stay_finite(estimator, schedule):
    model = small_llama(torch.bfloat16)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 4, "max_grad_norm": 1.0}
    engine = make_engine(model, estimator=estimator, schedule=schedule, **options)
    for _ in range(3):
        engine.backward(causal_lm_loss(model, small_batch()))
        assert bool(engine.squared_norms.isfinite().all())
        engine.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert engine.epsilon(1e-5) > 0


def test_a_step_under_autocast_has_the_norms_of_its_own_gradients():
    model, batch = small_llama(), small_batch()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        gradients = per_sample_gradients(model, causal_lm_loss(model, batch))
    truth = squared_norms(gradients)
    engine = make_engine(model, estimator="exact")
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        losses = causal_lm_loss(model, batch)
    engine.backward(losses)
    torch.testing.assert_close(engine.squared_norms.double(), truth, rtol=0.05, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["blocks", "tied", "recomputed"])
def test_a_job_of_one_gpu_learns_what_no_job_does(way, kind, tmp_path):
    expected, _ = trained("alone", kind, device="cuda")
    with alone_in_a_job("cpu:gloo,cuda:nccl", tmp_path):
        parameters, _ = trained(way, kind, device="cuda")
    assert_close(parameters, expected, 1e-4)


def test_both_peaks_see_an_allocation():
    torch.zeros(1, device=DEVICE)
    size = 64 << 20
    peak = measure_peak(lambda: torch.empty(size, dtype=torch.uint8, device=DEVICE), DEVICE, [])
    assert peak.allocated_bytes == size
    assert peak.device_bytes is not None
    assert peak.device_bytes >= size


def test_nvml_knows_this_gpu():
    torch.zeros(1, device=DEVICE)
    nvml = Nvml.of(DEVICE)
    assert isinstance(nvml, Nvml), nvml
    assert nvml.used_bytes() > 0
    occupancy = check_occupancy(nvml, DEVICE)
    assert occupancy.exclusive or occupancy.reason


def test_a_layer_is_timed_and_weighed():
    chosen = [estimators.get(name) for name in estimators.names()]
    profile = profile_layer(LayerShape(512, 256, 1024), chosen, device=DEVICE, repeats=3)
    rows = {row["estimator"]: row for row in profile.rows}
    assert all(row["latency_seconds"] > 0 for row in rows.values())
    assert rows["exact"]["clock"] == "CUDA events"
    assert rows["exact"]["workspace_bytes"] >= 4 * 512 * 256
    assert rows["ghost"]["workspace_bytes"] >= 4 * 2 * 1024**2
    assert rows["hutchinson"]["workspace_bytes"] < rows["exact"]["workspace_bytes"] * 2
