"""PrivateTrainer: the engine's result, through everything that Trainer does around it."""

import math

import datasets
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dprc import PrivacyEngine, PrivacyError
from dprc.losses import causal_lm_loss, classification_loss
from dprc.trainer import PrivacyArguments, PrivateTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:privacy_seed"),
    pytest.mark.filterwarnings("ignore:.*max_steps.*"),
]
EXAMPLES, EXPECTED, STEPS = 60, 12, 6
SAVING = {"save_strategy": "steps", "save_steps": 3}


def classifier(seed=0):
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(config)


def language_model(seed=0):
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def classified(count=EXAMPLES):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (count, 7), generator=generator)
    return [{"input_ids": row.tolist(), "labels": int(row[0]) % 3} for row in ids]


def texts(count=EXAMPLES):
    rows = [row["input_ids"] for row in classified(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": EXPECTED // 4,
        "max_steps": STEPS,
        "max_grad_norm": 0.5,
        "learning_rate": 0.05,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **options | changes)


def private(folder, model=None, *, rows=None, privacy=(), trainer=(), **changes):
    made = PrivateTrainer(
        model or classifier(),
        arguments(folder, **changes),
        train_dataset=classified() if rows is None else rows,
        privacy=PrivacyArguments(
            **{"delta": 1e-3, "noise_multiplier": 1.0, "privacy_seed": 5} | dict(privacy)
        ),
        **dict(trainer),
    )
    made.remove_callback(PrinterCallback)
    return made


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def by_the_engine(model, rows, *, noise, loss_fn=classification_loss, schedule="two_pass"):
    """Train as the Trainer's arguments say, without a Trainer: the engine and torch alone."""
    decayed = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(decayed, lr=0.05, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            step / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))
        ),
    )
    engine = PrivacyEngine(
        model,
        optimizer,
        max_grad_norm=0.5,
        noise_multiplier=noise,
        sample_rate=EXPECTED / EXAMPLES,
        expected_batch_size=EXPECTED,
        schedule=schedule,
        privacy_seed=5,
    )

    def collate(items):
        return {name: torch.tensor([item[name] for item in items]) for name in items[0]}

    loader = engine.poisson_loader(rows, steps=STEPS, max_physical_batch=4, collate_fn=collate)
    for logical_batch in loader:
        for batch in logical_batch:
            engine.backward(loss_fn(model, batch))
        engine.step()
        scheduler.step()
    engine.detach()
    return engine


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["classification", "causal"])
def test_the_result_is_the_plain_engines(noise, kind, tmp_path):
    model_fn, rows, loss_fn = (
        (classifier, classified(), classification_loss)
        if kind == "classification"
        else (language_model, texts(), causal_lm_loss)
    )
    trained = model_fn()
    trainer = private(tmp_path, trained, rows=rows, privacy={"noise_multiplier": noise})
    trainer.train()
    expected = model_fn()
    engine = by_the_engine(expected, rows, noise=noise, loss_fn=loss_fn)
    start = weights(model_fn())
    for name, value in weights(expected).items():
        assert torch.equal(weights(trained)[name], value), name
    assert not all(torch.equal(start[name], value) for name, value in weights(trained).items())
    assert trainer.engine.epsilon(1e-3) == engine.epsilon(1e-3)
    assert trainer.engine.sampled_by_loader


def test_noise_and_clipping_matter_to_that_comparison(tmp_path):
    trained, plain = classifier(), classifier()
    private(tmp_path, trained, privacy={"noise_multiplier": 0.0}).train()
    Trainer(plain, arguments(tmp_path), train_dataset=classified()).train()
    noisy = classifier()
    private(tmp_path, noisy).train()
    for other in (plain, noisy):
        assert any(
            not torch.allclose(value, weights(other)[name], atol=1e-4)
            for name, value in weights(trained).items()
        )


class TestEpsilon:
    def test_the_target_is_kept_and_logged(self, tmp_path):
        trainer = private(tmp_path, privacy={"noise_multiplier": None, "epsilon": 4.0})
        trainer.train()
        logged = [row["epsilon"] for row in trainer.state.log_history if "loss" in row]
        assert len(logged) == STEPS
        assert logged == sorted(logged)
        assert 3.9 < logged[-1] == trainer.engine.epsilon(1e-3) <= 4.0

    def test_epochs_are_expected_uses_of_each_example(self, tmp_path):
        trainer = private(tmp_path, max_steps=-1, num_train_epochs=1.4, warmup_steps=0)
        trainer.train()
        assert trainer.state.global_step == 7  # 60 / 12 = 5 steps an epoch
        assert trainer.engine.accountant.steps == 7
        assert trainer.engine.sample_rate == EXPECTED / EXAMPLES
        assert trainer.state.epoch == pytest.approx(1.4)

    def test_empty_batches_are_steps(self, tmp_path):
        trainer = private(
            tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=8
        )
        sizes = []
        drawn = trainer.get_batch_samples
        trainer.get_batch_samples = lambda *words: (
            lambda batch: (sizes.append(len(batch[0][0])), batch)[1]
        )(drawn(*words))
        trainer.train()
        assert 0 in sizes
        assert trainer.engine.accountant.steps == 8

    def test_a_second_call_is_refused(self, tmp_path):
        trainer = private(tmp_path)
        trainer.train()
        with pytest.raises(PrivacyError, match="train: was called before"):
            trainer.train()

    def test_a_search_is_refused(self, tmp_path):
        with pytest.raises(PrivacyError, match="hyperparameter_search"):
            private(tmp_path).hyperparameter_search(n_trials=2)

    def test_stepping_the_real_optimizer_is_refused(self, tmp_path):
        trainer = private(tmp_path)
        trainer.create_optimizer()
        with pytest.raises(PrivacyError, match="called directly"):
            trainer.optimizer.inner.step()


class Stop(TrainerCallback):
    """Ends the process's training in the middle, as a kill would."""

    def on_step_end(self, args, state, control, **others):
        if state.global_step == 4:
            raise KeyboardInterrupt


class TestResume:
    def test_it_gives_what_an_uninterrupted_run_gives(self, tmp_path):
        whole, cut, resumed = classifier(), classifier(), classifier()
        first = private(tmp_path / "whole", whole, **SAVING)
        first.train()
        broken = private(tmp_path / "cut", cut, trainer={"callbacks": [Stop()]}, **SAVING)
        with pytest.raises(KeyboardInterrupt):
            broken.train()
        second = private(tmp_path / "cut", resumed, **SAVING)
        second.train(resume_from_checkpoint=True)
        for name, value in weights(whole).items():
            assert torch.equal(weights(resumed)[name], value), name
        assert second.engine.epsilon(1e-3) == first.engine.epsilon(1e-3)
        assert second.state.epoch == first.state.epoch
        assert second.engine.accountant.steps == STEPS

    def test_a_checkpoint_without_the_engine_is_refused(self, tmp_path):
        private(tmp_path, **SAVING).train()
        (tmp_path / "checkpoint-3" / "privacy_engine.pt").unlink()
        with pytest.raises(PrivacyError, match=r"has no privacy_engine.pt"):
            private(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    def test_a_trainer_that_forgets_the_engine_is_refused(self, tmp_path, monkeypatch):
        private(tmp_path, **SAVING).train()
        monkeypatch.setattr(PrivateTrainer, "_load_optimizer_and_scheduler", lambda *_: None)
        with pytest.raises(PrivacyError, match="trainer is at step 6, the accountant at 0"):
            private(tmp_path, max_steps=8).train(resume_from_checkpoint=True)

    @pytest.mark.slow
    def test_another_mechanism_is_refused(self, tmp_path):
        private(tmp_path, **SAVING).train()
        changed = private(tmp_path, privacy={"noise_multiplier": 2.0})
        with pytest.raises(PrivacyError, match=r"noise_multiplier was 1\.0"):
            changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.slow
class TestWhatTrainerOffers:
    def test_unused_columns_are_removed(self, tmp_path):
        rows = [row | {"comment": "x"} for row in classified()]
        whole, cut = classifier(), classifier()
        private(tmp_path, whole).train()
        private(tmp_path, cut, rows=datasets.Dataset.from_list(rows)).train()
        again = classifier()
        private(tmp_path, again, rows=rows).train()
        for other in (cut, again):
            for name, value in weights(whole).items():
                assert torch.equal(weights(other)[name], value), name

    def test_adapters_alone_are_trained(self, tmp_path):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(language_model(), LoraConfig(r=2, target_modules=["q_proj"]))
        before = weights(model)
        private(tmp_path, model, rows=texts()).train()
        changed = {
            name for name, value in weights(model).items() if not torch.equal(before[name], value)
        }
        assert changed == {name for name, p in model.named_parameters() if p.requires_grad}

    def test_bf16_computes_losses_in_autocast(self, tmp_path):
        seen = []

        def losses_fn(model, batch):
            seen.append(torch.is_autocast_enabled("cpu"))
            return classification_loss(model, batch)

        trainer = private(tmp_path, bf16=True, trainer={"losses_fn": losses_fn})
        trainer.train()
        assert seen
        assert all(seen)
        assert next(trainer.model.parameters()).dtype == torch.float32

    def test_evaluation_between_steps_changes_no_training_bit(self, tmp_path):
        alone, watched = classifier(), classifier()
        private(tmp_path, alone).train()
        trainer = private(
            tmp_path,
            watched,
            trainer={"eval_dataset": classified(10)},
            eval_strategy="steps",
            eval_steps=2,
        )
        trainer.train()
        assert sum("eval_loss" in row for row in trainer.state.log_history) == 3
        for name, value in weights(alone).items():
            assert torch.equal(weights(watched)[name], value), name

    def test_checkpointing_and_book_keeping_train(self, tmp_path):
        one, other = language_model(), language_model()
        private(tmp_path, one, rows=texts(), privacy={"noise_multiplier": 0.0}).train()
        private(
            tmp_path,
            other,
            rows=texts(),
            privacy={"noise_multiplier": 0.0, "schedule": "book_keeping"},
            gradient_checkpointing=True,
        ).train()
        for name, value in weights(one).items():
            torch.testing.assert_close(weights(other)[name], value, atol=1e-3, rtol=1e-2)

    def test_the_card_goes_with_the_model(self, tmp_path):
        trainer = private(tmp_path)
        trainer.train()
        trainer.save_model(str(tmp_path / "model"))
        card = (tmp_path / "model" / "PRIVACY.md").read_text()
        assert f"ε = {trainer.engine.epsilon(1e-3):.6g}" in card
        assert "NOT RELEASABLE" in card
        assert not list((tmp_path / "model").glob("privacy_engine*"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("label_smoothing_factor", 0.1),
            ("auto_find_batch_size", True),
            ("train_sampling_strategy", "group_by_length"),
            ("dataloader_drop_last", True),
            ("dataloader_num_workers", 2),
            ("max_grad_norm", 0.0),
            ("neftune_noise_alpha", 5.0),
            ("optim", "lomo"),
            ("include_num_input_tokens_seen", "all"),
        ],
    )
    def test_arguments_that_would_break_the_guarantee_are_named(self, name, value, tmp_path):
        with pytest.raises(ValueError, match=f"args.{name}"):
            private(tmp_path, **{name: value})

    def test_loss_scaling_is_named(self, tmp_path):
        args = arguments(tmp_path)
        args.fp16 = True  # the class itself refuses it on a CPU
        with pytest.raises(ValueError, match=r"args\.fp16=True"):
            PrivateTrainer(classifier(), args, privacy=PrivacyArguments(delta=1e-3, epsilon=1.0))

    def test_several_processes_are_refused_with_the_way_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 2))
        with pytest.raises(ValueError, match=r"args\.world_size=2.*dprc\.distributed"):
            private(tmp_path)

    def test_packing_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="DataCollatorWithFlattening packs"):
            private(tmp_path, trainer={"data_collator": DataCollatorWithFlattening()})

    def test_a_scalar_loss_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"compute_loss_func: .* losses_fn"):
            private(tmp_path, trainer={"compute_loss_func": nn.CrossEntropyLoss()})
        trainer = private(tmp_path, trainer={"losses_fn": lambda m, b: m(**b).loss})
        with pytest.raises(PrivacyError, match="losses"):
            trainer.train()

    def test_a_stream_of_examples_is_named(self, tmp_path):
        stream = datasets.Dataset.from_list(classified()).to_iterable_dataset()
        with pytest.raises(TypeError, match="train_dataset: Poisson sampling"):
            private(tmp_path, rows=stream)

    def test_more_than_all_examples_are_named(self, tmp_path):
        with pytest.raises(ValueError, match="at most the 5 examples"):
            private(tmp_path, rows=classified(5))

    def test_a_delta_that_promises_nothing_is_warned_of(self, tmp_path):
        rows = classified()
        with pytest.warns(UserWarning, match=f"privacy.delta: 0.5 is not below 1/{len(rows)}"):
            private(tmp_path, rows=rows, privacy={"delta": 0.5})

    def test_one_target_is_needed(self):
        for both in ({}, {"epsilon": 1.0, "noise_multiplier": 1.0}):
            with pytest.raises(ValueError, match="epsilon, noise_multiplier: give one"):
                PrivacyArguments(delta=1e-5, **both)

    def test_labels_without_a_loss_are_named(self, tmp_path):
        rows = [row | {"labels": 0.5} for row in classified()]
        with pytest.raises(ValueError, match="losses_fn: labels of shape"):
            private(tmp_path, rows=rows).train()


@pytest.mark.slow
def test_a_padding_collator_pads_each_physical_batch(tmp_path):
    from tests.tiny import byte_tokenizer

    collator = DataCollatorWithPadding(byte_tokenizer())
    rows = [
        {"input_ids": row["input_ids"][: 3 + i % 5], "labels": row["labels"]}
        for i, row in enumerate(classified())
    ]
    trainer = private(tmp_path, rows=rows, trainer={"data_collator": collator})
    trainer.train()
    assert trainer.engine.excluded_samples == 0
