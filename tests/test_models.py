"""Models: what a folder and the settings make, and which combinations are refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import dprc
from dprc.checking import check_model
from dprc.cli import main
from dprc.models import TinyLlama, load_causal_lm, load_model, load_tokenizer
from dprc.settings import ModelSettings
from tests.tiny import byte_tokenizer, save_causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed", "ignore:num_probes")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal language model's folder, without a padding token."""
    return save_causal_lm(tmp_path_factory.mktemp("causal"), pad=False)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A folder as that of preset tiny-llama, on a random public embedding."""
    folder = tmp_path_factory.mktemp("backbone")
    embedding = torch.randn(260, 16, generator=torch.manual_seed(0)).numpy()
    TinyLlama(hidden_size=16, heads=2, intermediate_size=24).build(embedding).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return folder


def load(folder, *, num_labels=None, max_tokens=40, seed=0, **settings):
    settings = ModelSettings.model_validate({"path": str(folder), **settings})
    return load_model(settings, num_labels=num_labels, max_tokens=max_tokens, seed=seed)[0]


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def batch(num_labels=None):
    ids = torch.randint(3, 250, (3, 11), generator=torch.manual_seed(3))
    mask = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
    if num_labels:
        labels = torch.tensor([0, 1, num_labels - 1])
    else:
        labels = ids.masked_fill(mask == 0, -100)
    # 2 pads: the tokenizer without a padding token pads with the end token.
    return {"input_ids": ids * mask + 2 * (1 - mask), "attention_mask": mask, "labels": labels}


def loss_fn(num_labels):
    return dprc.losses.classification_loss if num_labels else dprc.losses.causal_lm_loss


class TestFullFineTuning:
    def test_a_language_model_has_the_weights_of_its_folder_and_trains_all(self, causal):
        model = load(causal)
        saved = LlamaForCausalLM.from_pretrained(causal).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved[name])
        assert all(p.requires_grad for p in model.parameters())

    def test_a_classifier_has_a_fresh_head_of_the_seed(self, causal):
        one, same, other = (load(causal, num_labels=5, seed=s) for s in (0, 0, 1))
        assert one.score.weight.shape == (5, 16)
        assert torch.equal(one.score.weight, same.score.weight)
        assert not torch.equal(one.score.weight, other.score.weight)
        assert torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)

    def test_the_classifier_reads_the_last_real_token(self, causal):
        model = load(causal, num_labels=5).eval()
        inputs = batch(5)
        del inputs["labels"]
        logits = model(**inputs).logits
        for row, length in enumerate((11, 7, 4)):
            states = model.model(input_ids=inputs["input_ids"][row : row + 1, :length])
            expected = model.score(states.last_hidden_state[0, -1])
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)

    def test_a_backbone_gives_its_frozen_embedding_and_fresh_blocks(self, backbone):
        for labels in (None, 5):
            one, other = (load(backbone, num_labels=labels, seed=s) for s in (0, 1))
            table = [getattr(m, "backbone", m).get_input_embeddings().weight for m in (one, other)]
            assert torch.equal(*table)
            assert not any(name.endswith(("embed_tokens.weight", "lm_head.weight"))
                           for name in trained(one))  # fmt: skip
            block = next(name for name in trained(one) if name.endswith("up_proj.weight"))
            assert not torch.equal(one.get_parameter(block), other.get_parameter(block))

    def test_the_backbones_language_model_has_the_public_embedding_as_its_head(self, backbone):
        model = load(backbone)
        assert model.lm_head.weight is model.model.embed_tokens.weight


class TestLora:
    @pytest.mark.parametrize(
        ("targets", "layers"), [("qv", ("q_proj", "v_proj")), ("all-linear", PROJECTIONS)]
    )
    def test_factors_stand_beside_the_chosen_layers_and_nothing_else_is_trained(
        self, causal, targets, layers
    ):
        model = load(causal, mode="lora", lora={"rank": 3, "alpha": 6.0, "targets": targets})
        expected = {
            f"base_model.model.model.layers.{i}.{block}.{layer}.lora_{side}.default.weight"
            for i in range(2)
            for layer in layers
            for block in ["self_attn" if layer[0] in "qkvo" and layer[1] == "_" else "mlp"]
            for side in "AB"
        }
        assert trained(model) == expected
        query = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        assert query.lora_A["default"].weight.shape == (3, 16)
        assert query.scaling["default"] == 2.0
        assert isinstance(query.lora_dropout["default"], torch.nn.Identity)

    @pytest.mark.parametrize("kind", ["causal", "backbone"])
    def test_a_classifiers_head_is_trained_too(self, kind, request):
        model = load(request.getfixturevalue(kind), num_labels=5, mode="lora")
        names = trained(model)
        assert sum("lora_" not in name for name in names) == (1 if kind == "causal" else 2)
        assert all("lora_" in n or ".score." in n or ".head." in n for n in names)

    def test_it_begins_as_the_model_it_adapts(self, causal):
        inputs = batch()
        plain, adapted = load(causal).eval(), load(causal, mode="lora").eval()
        logits = [model(input_ids=inputs["input_ids"]).logits for model in (plain, adapted)]
        assert torch.equal(*logits)

    def test_factors_follow_the_seed(self, causal):
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        one, same, other = (
            load(causal, mode="lora", seed=s).get_parameter(name) for s in (0, 0, 1)
        )
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_layers_that_are_not_there_are_named(self, tmp_path):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=260, n_embd=8, n_layer=1, n_head=1, n_positions=50)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"model.lora.targets: 'qv' finds none"):
            load(tmp_path, mode="lora")


@pytest.mark.parametrize("kind", ["causal", "backbone"])
@pytest.mark.parametrize("num_labels", [None, 5])
@pytest.mark.parametrize("lora", [None, "qv", "all-linear"])
def test_norms_are_those_of_brute_force(kind, num_labels, lora, request):
    options = {"mode": "lora", "lora": {"rank": 2, "targets": lora}} if lora else {}
    model = load(request.getfixturevalue(kind), num_labels=num_labels, **options).double()
    with torch.no_grad():  # factors that start at zero have no gradient on their other side
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    rows = check_model(model, batch(num_labels), loss_fn(num_labels))
    assert {row["name"] for row in rows} == trained(model)
    assert max(row["max_relative_error"] for row in rows) < 1e-6


class TestOptions:
    def test_precision(self, causal, backbone):
        for folder in (causal, backbone):
            for labels in (None, 5):
                model = load(folder, num_labels=labels, dtype="bfloat16")
                assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    def test_lora_factors_stay_in_full_precision(self, causal):
        model = load(causal, mode="lora", dtype="bfloat16")
        kinds = {"lora_" in name: p.dtype for name, p in model.named_parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16}

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_attention(self, causal, backbone, attention):
        for folder in (causal, backbone):
            model = load(folder, num_labels=5, attention=attention)
            assert getattr(model, "backbone", model).config._attn_implementation == attention

    @pytest.mark.parametrize("kind", ["causal", "backbone"])
    @pytest.mark.parametrize("num_labels", [None, 5])
    @pytest.mark.parametrize("mode", ["full", "lora"])
    def test_checkpointing_changes_no_gradient(self, kind, num_labels, mode, request):
        gradients, recomputed = [], []
        for checkpointing in (False, True):
            model = load(
                request.getfixturevalue(kind),
                num_labels=num_labels,
                mode=mode,
                gradient_checkpointing=checkpointing,
            ).train()
            calls = []
            block = next(m for name, m in model.named_modules() if name.endswith("layers.0.mlp"))
            block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            losses = loss_fn(num_labels)(model, batch(num_labels))
            before = len(calls)
            losses.sum().backward()
            recomputed.append(len(calls) > before)
            gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        assert recomputed == [False, True]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    def test_flash_attention_without_its_package_is_refused(self, causal):
        with pytest.raises(ValueError, match=r"model.attention: flash_attention_2 needs a CUDA"):
            load(causal, attention="flash_attention_2", dtype="bfloat16")

    def test_more_tokens_than_positions_are_refused(self, causal):
        with pytest.raises(ValueError, match=r"task.max_tokens: the model has 512 positions"):
            load(causal, max_tokens=513)

    def test_a_folder_without_a_model_says_what_to_run(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"model.path: .* dprc prepare-model"):
            load(tmp_path)


class TestTokenizer:
    def test_the_end_token_pads_where_nothing_else_does(self, causal):
        tokenizer = load_tokenizer(causal)
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2

    def test_llama_3s_own_token_is_preferred(self, tmp_path):
        tokenizer = byte_tokenizer(pad=False)
        tokenizer.add_tokens(["<|finetune_right_pad_id|>"], special_tokens=True)
        tokenizer.save_pretrained(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert loaded.pad_token_id == 259 != loaded.eos_token_id

    def test_a_folder_without_one_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"neither the preset .* tokenizer\.json"):
            load_tokenizer(tmp_path)

    def test_one_that_pads_is_left_alone(self, backbone):
        assert load_tokenizer(backbone).pad_token_id == 0


class TestPreparing:
    def test_a_local_copy_is_written_as_it_is(self, causal, tmp_path):
        words = ["prepare-model", "--preset", "llama-3.2-1b", "--source", str(causal)]
        assert main([*words, "--out", str(tmp_path)]) == 0
        written = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        for name, value in AutoModelForCausalLM.from_pretrained(causal).state_dict().items():
            assert torch.equal(written[name], value)
        about = json.loads((tmp_path / "model.json").read_text())
        assert about["config"]["preset"] == "llama-3.2-1b"
        assert about["metrics"]["parameters"] == sum(v.numel() for v in dict(
            load(tmp_path).named_parameters()).values())  # fmt: skip
        assert {"config.json", "model.safetensors", "tokenizer.json", "model.json"} <= {
            file.name for file in tmp_path.iterdir()
        }

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["llama-3.2-1b", "--source", "nowhere"], "--source: nowhere holds no model"),
            (["llama-3.2-1b", "--layers", "2"], "--layers: only preset tiny-llama can be sized"),
            (["smollm2-135m", "--source", "x"], "--source: preset smollm2-135m comes from"),
        ],
    )
    def test_what_does_not_fit_is_one_line(self, words, message, capsys, tmp_path):
        assert main(["prepare-model", "--preset", *words, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1

    def test_without_a_hub_the_way_out_is_named(self, capsys, tmp_path):
        assert main(["prepare-model", "--preset", "llama-3.2-1b", "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "cannot load meta-llama/Llama-3.2-1B" in error
        assert "--source" in error
        assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_smollm2_of_the_package_is_written_and_loaded(tmp_path):
    assert main(["prepare-model", "--preset", "smollm2-135m", "--out", str(tmp_path)]) == 0
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["metrics"]["parameters"] == 134_515_008
    model = load(tmp_path, mode="lora")
    assert model.base_model.model.lm_head.weight is (
        model.base_model.model.model.embed_tokens.weight
    )
    ids = torch.tensor([load_tokenizer(tmp_path)("The capital of France is").input_ids])
    direct = load_causal_lm("smollm2-135m").eval()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(logits, direct(input_ids=ids).logits)
    assert load_tokenizer(tmp_path).decode(logits[0, -1].argmax()) == " Paris"
