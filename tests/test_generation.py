"""Generation: the most likely token again and again, whatever the batch, with or without LoRA."""

import pytest
import torch

import dprc
from dprc.generation import evaluating, generate
from dprc.models.lora import add_lora
from dprc.recompute import recompute_blocks
from dprc.settings import LoraSettings
from tests.tiny import causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed", "ignore:num_probes")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
OPTIONS = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 2}


def by_hand(model, prompt, steps, eos=2):
    """Take the largest logit of the whole text again and again; no cache, no padding."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if best == eos:
            break
        ids.append(best)
    return ids[len(prompt) :]


def with_lora(model):
    peft = add_lora(model, LoraSettings(rank=2), head="lm_head", trains_head=False, seed=0)
    with torch.no_grad():  # factors start at zero, where LoRA does nothing
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    return peft.eval()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda model: model, with_lora])
def test_each_prompt_gets_what_it_gets_alone(batch_size, wrap):
    model = wrap(causal_lm())
    written = generate(model, PROMPTS, batch_size=batch_size, **OPTIONS)
    assert written == [by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in written}) == 3


def test_lora_changes_what_is_written():
    plain = generate(causal_lm(), PROMPTS, **OPTIONS)
    assert generate(with_lora(causal_lm()), PROMPTS, **OPTIONS) != plain


def test_a_text_ends_at_the_end_token():
    model = causal_lm()
    free = by_hand(model, PROMPTS[0], 6)
    stop = free[3]
    first = free.index(stop)
    options = OPTIONS | {"eos_token_id": stop}
    assert generate(model, PROMPTS[:2], batch_size=2, **options)[0] == free[:first]


def test_what_the_models_own_configuration_says_about_sampling_is_not_used():
    model = causal_lm()
    expected = generate(model, PROMPTS, **OPTIONS)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    assert generate(model, PROMPTS, **OPTIONS) == expected
    assert model.generation_config.repetition_penalty == 3.0


def test_modes_are_put_back_module_by_module():
    model = causal_lm().train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == before
    generate(model, PROMPTS, **OPTIONS)
    assert [module.training for module in model.modules()] == before


def test_checkpointing_does_not_hinder_it():
    model = causal_lm().train()
    recompute_blocks(model)
    model.config.use_cache = False
    assert generate(model, PROMPTS, **OPTIONS) == generate(causal_lm(), PROMPTS, **OPTIONS)


def batch_of(rows):
    ids = torch.randint(3, 250, (rows, 9), generator=torch.manual_seed(5))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("wrap", [lambda model: model, with_lora])
@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
def test_a_model_held_by_an_engine_writes_the_same_and_trains_on_as_if_it_had_not(wrap, schedule):
    ends = []
    for evaluates in (False, True):
        model = wrap(causal_lm()).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = dprc.PrivacyEngine(
            model,
            torch.optim.SGD(trained, lr=0.1),
            max_grad_norm=1.0,
            noise_multiplier=0.5,
            sample_rate=0.5,
            expected_batch_size=4,
            num_probes=8,
            schedule=schedule,
            privacy_seed=1,
        )
        for _ in range(2):
            for rows in (3, 2):
                if evaluates:
                    written = generate(model, PROMPTS, **OPTIONS)
                    assert written == [by_hand(model.eval(), prompt, 6) for prompt in PROMPTS]
                    model.train()
                engine.backward(dprc.losses.causal_lm_loss(model, batch_of(rows), 4))
                if evaluates:
                    generate(model, PROMPTS[:1], **OPTIONS)
            engine.step()
        ends.append([p.detach().clone() for p in trained])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
    ],
)
def test_impossible_numbers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        generate(causal_lm(), PROMPTS, **OPTIONS | change)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty"):
        generate(causal_lm(), [[1], []], **OPTIONS)
