"""Simulated memory against a real allocator, hand counts, and published numbers of parameters."""

import dataclasses

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from dprc import estimators
from dprc.noise import Stream
from dprc.profiling.flops import LayerShape
from dprc.profiling.layer_memory import layer_memory, layer_rows
from dprc.profiling.memory import Step, Workbench, model_rows, simulate_step
from dprc.profiling.meter import MemoryMeter, ShapesOnlyStream
from dprc.profiling.presets import ModelShape, load_shape, presets
from dprc.profiling.recommend import matrices, step_peak

SMALL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
BASE = Step(tokens=128, batch=2, optimizer="sgd", chunk_tokens=32)


def small(**options):
    return ModelShape("small", SMALL | options).config()


def allocator_peak(run):
    """Return the most bytes that torch's CPU allocator had handed out during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def real_peak(config, step):
    bench = Workbench(config, step, None)
    ids = bench.ids(step.batch, step.tokens)
    held = [tensor.untyped_storage() for _, tensors in bench.held() for tensor in tensors]
    resident = {memory.data_ptr(): memory.nbytes() for memory in held}
    before = sum(resident.values()) + ids.untyped_storage().nbytes()
    return before + allocator_peak(lambda: bench.take(ids))


def step(**options):
    return dataclasses.replace(BASE, **options)


# (where the peak must be, model, step). "estimator": within norm estimation; "head": a tensor with
# a vocabulary axis is the largest; None: wherever.
CASES = [
    (None, {}, step()),
    (None, {}, step(estimator="hutchinson", checkpointing=True, optimizer="adamw")),
    (None, {}, step(estimator="exact", schedule="book_keeping", loss="full")),
    ("head", {"vocab_size": 8192}, step(estimator="hutchinson", loss="full")),
    ("head", {"vocab_size": 8192, "tie_word_embeddings": True}, step(tokens=64, chunk_tokens=16)),
    ("head", {"vocab_size": 8192}, step(estimator="hutchpp", schedule="book_keeping")),
    ("estimator", {}, step(estimator="ghost", tokens=512)),
    ("estimator", {}, step(estimator="exact", batch=16, tokens=16)),
    ("estimator", {}, step(estimator="hutchinson", num_probes=120, batch=16, tokens=16)),
]
MORE_CASES = [
    ("estimator", {}, step(estimator="ghost", tokens=1024, loss="full")),
    ("estimator", {}, step(estimator="exact", batch=16, tokens=16, schedule="book_keeping")),
    ("estimator", {}, step(estimator="hutchpp", num_probes=100, batch=16, tokens=16)),
    ("estimator", {}, step(estimator="hutchpp", num_probes=120, head_rank=2, batch=16, tokens=16)),
    (
        "estimator",
        {},
        step(estimator="hutchinson", num_probes=120, batch=16, tokens=16, sketch="shared"),
    ),
    ("head", {"tie_word_embeddings": True, "vocab_size": 2000}, step(estimator="tiled")),
    (None, {}, step(estimator="tiled", optimizer="adamw")),
    (None, {}, step(forward_only=True)),
    (None, {"tie_word_embeddings": True}, step(estimator="hutchinson", optimizer="adamw")),
    (None, {}, step(checkpointing=True, loss="full", optimizer="adamw")),
    (None, {"model_type": "qwen2"}, step(estimator="hutchinson")),
    (None, {}, step(estimator="hutchinson", lora_rank=4)),
]


def check_against_allocator(place, options, wanted):
    config = small(**options)
    memory = simulate_step(config, wanted, numpy_draws=True)
    assert memory.peak_bytes == pytest.approx(real_peak(config, wanted), rel=0.01)
    assert memory.peak_bytes == sum(memory.composition.values())
    if place == "head":
        assert config.vocab_size in memory.largest[0]["shape"]
    if place == "estimator":
        assert memory.phase == "norms"
        frugal = dataclasses.replace(wanted, estimator="hutchinson", num_probes=4, head_rank=None)
        other = simulate_step(config, frugal, numpy_draws=True)
        assert memory.peak_by_phase["norms"] > other.peak_by_phase["norms"]


@pytest.mark.parametrize(("place", "options", "wanted"), CASES)
def test_the_peak_is_what_the_allocator_hands_out(place, options, wanted):
    check_against_allocator(place, options, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "options", "wanted"), MORE_CASES)
def test_more_peaks_are_what_the_allocator_hands_out(place, options, wanted):
    check_against_allocator(place, options, wanted)


@pytest.mark.parametrize("estimator", [None, "hutchinson"])
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_fake_and_real_steps_run_the_same_operators(estimator, model):
    config, wanted = small(model_type=model), step(estimator=estimator)

    def operators(mode):
        bench = Workbench(config, wanted, mode)
        meter = MemoryMeter(record_operators=True)

        class Unseen(Stream if mode is None else ShapesOnlyStream):
            """Numbers that numpy makes in one and nobody in the other."""

            def normal(self, *args, **kwargs):
                with meter.paused():
                    return super().normal(*args, **kwargs)

            def add_normal_(self, *args, **kwargs):
                with meter.paused():
                    super().add_normal_(*args, **kwargs)

        bench.draw_from(lambda stream: Unseen(stream.key))
        ids = torch.arange(wanted.batch * wanted.tokens).view(wanted.batch, -1)  # all differ
        bench.take(ids if mode is None else mode.from_tensor(ids), meter)
        # Gradients that meet are added in place only where no dispatch mode looks.
        return [
            (name.replace("add_.", "add."), shapes)
            for name, shapes in meter.operators
            if "profiler" not in name
        ]

    fake, real = operators(FakeTensorMode(allow_non_fake_inputs=True)), operators(None)
    for index, (mine, truth) in enumerate(zip(fake, real, strict=False)):
        assert mine == truth, index
    assert len(fake) == len(real)
    assert any("flash_attention" in name for name, _ in fake)


class TestMeter:
    def test_counts_what_lives_at_once(self):
        with MemoryMeter() as meter:
            first = torch.empty(1000)
            second = torch.empty(500)
            del first
            third = torch.empty(250)
            view = second[:10]
            del second
            fourth = torch.empty(100)
        assert meter.peak().num_bytes == 4 * 1500
        assert len(meter.storages) == 4
        assert [s.num_bytes for s in meter.peak().alive] == [4000, 2000]
        assert (view.numel(), third.numel(), fourth.numel()) == (10, 250, 100)

    def test_a_kept_tensor_raises_the_peak(self):
        def peak(keep):
            kept = []
            with MemoryMeter() as meter:
                for _ in range(3):
                    tensor = torch.empty(100)
                    kept.append(tensor if keep else None)
                    del tensor
            return meter.peak().num_bytes

        assert peak(keep=True) == 3 * peak(keep=False)

    def test_gradients_that_meet_are_added_in_place_as_without_a_mode(self):
        size = 10_000

        def backward(make):
            weights = [make(size) for _ in range(4)]
            x = make(size).requires_grad_()
            middle = x * 2
            losses = [(middle * weight).sum() for weight in weights]
            return lambda: torch.autograd.grad(losses, x)

        real = allocator_peak(backward(torch.randn))
        with FakeTensorMode():
            run = backward(torch.empty)
            with MemoryMeter() as meter:
                run()
        assert meter.peak().num_bytes == pytest.approx(real, rel=0.01)

    def test_tensors_of_before_count_under_their_label(self):
        weights = torch.empty(100)
        meter = MemoryMeter()
        meter.hold([weights], "parameters")
        with meter:
            torch.empty(10)
        assert meter.peak().num_bytes == 440
        assert [s.label for s in meter.peak().alive] == ["parameters", None]


class TestLayer:
    """Layer 8192 -> 2048 at T=4096, k=32, float32: the paper's."""

    SHAPE = LayerShape(8192, 2048, 4096)
    D, P, T, K = 8192, 2048, 4096, 32

    def weigh(self, name, sketch="shared", **options):
        return layer_memory(
            estimators.get(name, num_probes=self.K, sketch=sketch), self.SHAPE, **options
        )

    def test_exact_norms_take_one_gradient_or_two(self):
        gradient = 4 * self.D * self.P
        assert self.weigh("exact").workspace_bytes == pytest.approx(gradient, abs=64)
        copied = layer_memory(None, self.SHAPE)
        assert copied.workspace_bytes == pytest.approx(2 * gradient, abs=64)
        assert copied.input_bytes == 4 * self.T * (self.D + self.P)

    def test_ghost_takes_two_gram_matrices(self):
        assert self.weigh("ghost").workspace_bytes == pytest.approx(8 * self.T**2, abs=64)

    def test_hutchinson_takes_the_thin_factor_one_block_and_the_sketch(self):
        memory = self.weigh("hutchinson")
        assert memory.token_workspace_bytes == 4 * self.K * self.T
        assert memory.workspace_bytes == 4 * self.K * (self.T + self.P)
        whole = self.weigh("hutchinson", whole_projection=True)
        assert whole.workspace_bytes == 4 * self.K * (self.T + self.D)

    def test_savings_of_the_published_counts(self):
        exact = self.weigh("exact").workspace_bytes
        for name, numbers in (
            ("hutchinson", self.K * self.T),
            ("hutchpp", 3 * self.K * self.T + self.K**2),
        ):
            published = 1 - numbers / (self.D * self.P)
            found = 1 - self.weigh(name).token_workspace_bytes / exact
            assert abs(found - published) < 0.01
        # All of it, the projection matrix and the sketched gradient too.
        assert 1 - self.weigh("hutchinson").workspace_bytes / exact > 0.9922 - 0.01

    def test_savings_with_inputs_in_both_conventions(self):
        rows = {
            (row["estimator"], row["sketch"], row["projection"]): row
            for row in layer_rows([(self.D, self.P)], [self.T], [self.K])
        }
        row = rows["hutchinson", "shared", "by_block"]
        assert row["saving_including_inputs"] == pytest.approx(0.28, abs=0.005)
        assert row["saving_including_inputs_copied"] == pytest.approx(0.44, abs=0.005)
        assert rows["exact", None, None]["saving_excluding_inputs"] == pytest.approx(0, abs=1e-6)

    # Not hutchpp: LAPACK's QR takes scratch that no dispatcher sees.
    @pytest.mark.parametrize("name", ["exact", "ghost", "tiled", "hutchinson"])
    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    @pytest.mark.parametrize("shape", [LayerShape(640, 96, 50, batch=3), LayerShape(96, 640, 300)])
    def test_the_workspace_is_what_the_allocator_hands_out(self, name, sketch, shape):
        estimator = estimators.get(name, num_probes=8, sketch=sketch)
        left = torch.randn(shape.batch, shape.tokens, shape.in_features)
        right = torch.randn(shape.batch, shape.tokens, shape.out_features)
        generator = torch.Generator().manual_seed(0)
        real = allocator_peak(lambda: estimator.squared_norm(left, right, generator))
        simulated = layer_memory(estimator, shape).workspace_bytes
        # numpy's numbers are outside of torch's allocator: at most a sketch, of each side at most.
        drawn = 4 * 8 * shape.batch * 640 if estimator.randomized else 0
        assert real <= simulated * 1.01 + 64
        assert real >= simulated - drawn - 64

    def test_a_sketch_by_block_needs_less_where_it_matters(self):
        layer = LayerShape(8192, 2048, 1024)
        estimator = estimators.get("hutchinson", num_probes=4096, sketch="shared")
        by_block = layer_memory(estimator, layer).workspace_bytes
        whole = layer_memory(estimator, layer, whole_projection=True).workspace_bytes
        assert by_block < 0.6 * whole


# As the makers publish them.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
}


class TestPresets:
    def test_all_presets_have_a_published_size(self):
        assert set(PARAMETERS) == set(presets())

    @pytest.mark.parametrize("name", sorted(PARAMETERS))
    def test_the_number_of_parameters_is_the_published_one(self, name):
        config = load_shape(name).config()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]

    def test_names_are_found_whatever_their_case_and_organisation(self):
        assert load_shape("meta-llama/Llama-3.2-1B").name == "llama-3.2-1b"

    def test_layers_are_those_of_the_model(self):
        shapes, _ = matrices(small(num_hidden_layers=3, tie_word_embeddings=True))
        found = {(s["in_features"], s["out_features"]): s["count"] for s in shapes}
        assert found == {(128, 128): 6, (128, 64): 6, (128, 352): 6, (352, 128): 3, (128, 512): 1}

    def test_transposed_layers_are_turned(self):
        tiny = {"model_type": "gpt2", "vocab_size": 90, "n_embd": 24, "n_layer": 1, "n_head": 2}
        shapes, _ = matrices(ModelShape("tiny", tiny).config())
        assert {(s["in_features"], s["out_features"]) for s in shapes} == {
            (24, 72), (24, 24), (24, 96), (96, 24), (24, 90),
        }  # fmt: skip


class TestModel:
    def test_attention_is_linear_in_the_tokens(self):
        config = small(num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=32)
        many = {"loss": "full", "forward_only": True}
        peaks = [
            simulate_step(config, step(tokens=t, **many)).peak_bytes for t in (1024, 2048, 4096)
        ]
        first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
        assert second == pytest.approx(2 * first, rel=0.02)

    def test_rows_have_a_ratio_to_the_step_without_privacy(self):
        rows = model_rows(
            ModelShape("small", SMALL), [64, 128], modes=["hutchinson_two_pass"], optimizer="sgd"
        )
        assert [(row["tokens"], row["mode"]) for row in rows] == [
            (64, "nonprivate"),
            (64, "hutchinson_two_pass"),
            (128, "nonprivate"),
            (128, "hutchinson_two_pass"),
        ]
        assert [rows[0]["ratio_to_nonprivate"], rows[2]["ratio_to_nonprivate"]] == [1, 1]

    def test_an_unknown_mode_is_refused(self):
        with pytest.raises(ValueError, match="--modes: must be of forward"):
            model_rows(ModelShape("small", SMALL), [64], modes=["fast"])

    @pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"loss": "half"}, {"tokens": 1}])
    def test_bad_settings_are_refused_by_name(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            step(**options)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "wanted",
        [
            step(estimator="hutchinson", checkpointing=True, tokens=32),
            step(estimator="exact", schedule="book_keeping", tokens=32, optimizer="sgd"),
        ],
    )
    def test_a_deep_models_peak_follows_from_two_shallow_ones(self, wanted):
        config = small(num_hidden_layers=5)
        found = step_peak(config, wanted)
        assert found["extrapolated_from"] == {"layers": [2, 4]}
        assert found["peak_bytes"] == simulate_step(config, wanted).peak_bytes

    @pytest.mark.slow
    def test_a_large_batchs_peak_follows_from_two_small_ones(self):
        wanted = step(batch=20, tokens=16, estimator="hutchinson")
        found = step_peak(small(), wanted)
        assert found["extrapolated_from"] == {"batch": [8, 16]}
        assert found["peak_bytes"] == simulate_step(small(), wanted).peak_bytes

    @pytest.mark.slow
    def test_private_steps_of_a_real_model_need_little_more_memory(self):
        rows = model_rows(
            load_shape("llama-3.2-1b"),
            [4096],
            modes=["hutchinson_two_pass", "hutchinson_book_keeping", "exact_two_pass"],
        )
        assert all(row["ratio_to_nonprivate"] <= 1.10 for row in rows)
