"""A saved model predicts what it predicted, and its folder holds the model and nothing else."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dprc import saved_models
from dprc.models import MeanPooledClassifier, name_labels
from dprc.privacy_card import write_card
from dprc.saved_models import load_classifier_folder, save_model

IDS, MASK = torch.tensor([[5, 9, 2, 7], [1, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def configuration():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "word": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def classifier(dtype=torch.float32):
    from transformers import LlamaModel

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MeanPooledClassifier(LlamaModel(configuration()).to(dtype), 3, seed=4).to(dtype)
    return model.eval()


def with_adapters(model, task_type=None, head=None):
    """Put adapters on a model that are not zero, as trained ones are not."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model,
        LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], modules_to_save=head, task_type=task_type
        ),
    )
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_classifier_predicts_the_same_after_loading(dtype, tokenizer, tmp_path):
    model = classifier(dtype)
    name_labels(model, ("sport", "tech", "art"))
    save_model(model, tokenizer, tmp_path / "model")
    loaded, its_tokenizer = load_classifier_folder(tmp_path / "model")
    assert torch.equal(loaded(IDS, MASK).logits, model(IDS, MASK).logits)
    assert its_tokenizer("word")["input_ids"] == [1]
    assert not loaded.training
    assert loaded.label_names == ("sport", "tech", "art")


def test_a_classifier_of_the_library_keeps_the_names_of_its_classes(tmp_path):
    from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

    config = configuration()
    config.num_labels, config.pad_token_id = 2, 0
    model = LlamaForSequenceClassification(config)
    name_labels(model, ("spam", "ham"))
    save_model(model, None, tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert loaded.config.id2label == {0: "spam", 1: "ham"}
    assert loaded.config.label2id == {"spam": 0, "ham": 1}
    adapted = with_adapters(model, task_type="SEQ_CLS")
    name_labels(adapted, ("a", "b"))
    assert adapted.get_base_model().config.id2label == {0: "a", 1: "b"}


def test_a_language_model_is_loaded_by_its_library(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = LlamaForCausalLM(configuration()).eval()
    save_model(model, tokenizer, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    with pytest.raises(FileNotFoundError, match=r"classifier\.json is missing"):
        load_classifier_folder(tmp_path / "model")


def test_adapters_of_a_classifier_come_with_the_base_that_lies_nowhere_else(tokenizer, tmp_path):
    model = with_adapters(classifier(), head=["head"])
    expected = model(input_ids=IDS, attention_mask=MASK).logits
    assert not torch.equal(expected, classifier()(IDS, MASK).logits)
    save_model(model, tokenizer, tmp_path / "model")
    loaded, _ = load_classifier_folder(tmp_path / "model")
    assert torch.equal(loaded(input_ids=IDS, attention_mask=MASK).logits, expected)


@pytest.mark.parametrize("lies_somewhere", [True, False])
def test_adapters_alone_are_saved_where_the_base_can_be_loaded(lies_somewhere, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    base = LlamaForCausalLM(configuration())
    if lies_somewhere:
        base.save_pretrained(tmp_path / "prepared")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "prepared")
    model = with_adapters(base, task_type="CAUSAL_LM")
    expected = model(input_ids=IDS).logits
    save_model(model, None, tmp_path / "model")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    here = set() if lies_somewhere else {"base"}
    assert files == {"adapter_config.json", "adapter_model.safetensors"} | here
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / ("prepared" if lies_somewhere else "model/base")
    )
    loaded = PeftModel.from_pretrained(again, tmp_path / "model").eval()
    assert torch.equal(loaded(input_ids=IDS).logits, expected)


def test_adapters_on_fresh_blocks_do_not_name_the_folder_of_a_bare_backbone(tmp_path):
    from transformers import LlamaForCausalLM, LlamaModel

    LlamaModel(configuration()).save_pretrained(tmp_path / "prepared")
    config = LlamaModel.from_pretrained(tmp_path / "prepared").config
    model = with_adapters(LlamaForCausalLM(config), "CAUSAL_LM").eval()
    expected = model(IDS).logits
    save_model(model, None, tmp_path / "model")
    assert (tmp_path / "model" / "base" / "model.safetensors").is_file()
    # The usual way to load adapters finds this base, and no other with a random head.
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(loaded(IDS).logits, expected)


def test_saving_again_replaces_the_folder_whole(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("")
    save_model(classifier(), None, tmp_path / "model")
    assert not (tmp_path / "model" / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_of_no_library_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="Linear has no save_pretrained; switch save_model off"):
        save_model(nn.Linear(2, 2), None, tmp_path / "model")
    assert not list(tmp_path.iterdir())


class TestCard:
    def test_lies_beside_the_model_as_text_and_as_facts(self, tmp_path):
        facts = {"epsilon": 2.5, "delta": 1e-6, "releasable": True, "sampled_by_loader": True}
        write_card(tmp_path, facts)
        told = json.loads((tmp_path / "privacy.json").read_text())
        assert told["epsilon"] == 2.5
        assert {"covered", "assumed", "not_covered"} <= set(told)
        assert "ε = 2.5" in (tmp_path / "PRIVACY.md").read_text()

    def test_claims_nothing_for_a_run_without_privacy(self, tmp_path):
        write_card(tmp_path, None)
        assert "WITHOUT privacy" in (tmp_path / "PRIVACY.md").read_text()
        assert not (tmp_path / "privacy.json").exists()


@pytest.mark.parametrize(
    ("architecture", "has_head"),
    [("LlamaForCausalLM", True), ("GPT2LMHeadModel", True), ("LlamaModel", False)],
)
def test_a_base_with_a_head_is_loaded_from_where_it_came(tmp_path, architecture, has_head):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    base = SimpleNamespace(config=SimpleNamespace(_name_or_path=str(tmp_path)))
    assert saved_models._comes_from_a_folder(base) is has_head
