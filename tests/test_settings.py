"""Settings of a run: what is unknown, missing or ill-typed is named in one line."""

import copy
import json

import pytest
import yaml

from dprc.settings import parse_settings

GOOD = {
    "task": {"name": "bbc_offline", "data": "data", "max_tokens": 96},
    "model": {"path": "model", "mode": "full"},
    "method": {"estimator": "hutchinson", "num_probes": 16, "sketch": "shared"},
    "privacy": {"epsilon": 9, "delta": 1e-5, "max_grad_norm": 1.0},
    "training": {"sample_rate": 0.2, "steps": 12, "learning_rate": 0.02},
    "seed": 0,
    "privacy_seed": None,
}


def changed(key, value):
    settings = copy.deepcopy(GOOD)
    *parents, last = key.split(".")
    place = settings
    for parent in parents:
        place = place[parent]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return settings


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_json_and_yaml_are_read_alike(write):
    settings = parse_settings(write(GOOD), origin="file")
    assert settings.privacy.delta == 1e-5
    assert settings.method.accounting() == {
        "estimator": "hutchinson", "num_probes": 16, "sketch": "shared", "analysis": "tight",
    }  # fmt: skip


def test_yaml_reads_scientific_numbers_as_people_mean_them():
    text = yaml.safe_dump(GOOD).replace("1.0e-05", "1e-5")
    assert "1e-5" in text
    assert parse_settings(text, origin="file").privacy.delta == 1e-5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.learning_rat", 0.1, "unknown key 'training.learning_rat'"),
        ("sede", 1, "unknown key 'sede'"),
        ("training.steps", KeyError, "missing key 'training.steps'"),
        ("method", KeyError, "missing key 'method'"),
        ("training.steps", "12", "training.steps: .*integer.* got '12'"),
        ("training.steps", 0, "training.steps: .*greater than or equal to 1, got 0"),
        ("privacy.epsilon", 0, "privacy.epsilon: .*greater than 0, got 0"),
        ("privacy.epsilon", -1.0, "privacy.epsilon: .*greater than 0, got -1.0"),
        ("privacy.delta", 1.0, "privacy.delta: .*less than 1, got 1.0"),
        ("privacy.delta", 0.0, "privacy.delta: .*greater than 0, got 0.0"),
        ("privacy.max_grad_norm", float("inf"), "privacy.max_grad_norm: .*finite"),
        ("training.sample_rate", 1.5, "training.sample_rate: .*got 1.5"),
        ("method.sketch", "both", "method.sketch: .*'per_sample' or 'shared', got 'both'"),
        ("privacy", None, "method and privacy must both be given"),
        ("seed", True, "seed: .*integer"),
        ("training.momentum", 0.9, "training: momentum is an option of sgd, not of adamw"),
        ("training.warmup_steps", 13, "training: warmup_steps must be at most steps=12, got 13"),
        ("training.schedule", "cosin", "training.schedule: .*'cosine', got 'cosin'"),
        ("training.learning_rate", float("nan"), "training.learning_rate: .*got nan"),
        ("output", {"checkpoint_evry": 5}, "unknown key 'output.checkpoint_evry'"),
        ("output", {"checkpoint_every": 0}, "output.checkpoint_every: .*or equal to 1, got 0"),
    ],
)
def test_a_bad_key_is_named(key, value, message):
    with pytest.raises(ValueError, match=f"run.yaml: .*{message}") as caught:
        parse_settings(yaml.safe_dump(changed(key, value)), origin="run.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "just words"])
def test_what_is_not_a_mapping_is_refused(text):
    with pytest.raises(ValueError, match=r"run\.yaml"):
        parse_settings(text, origin="run.yaml")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora": {"rank": 8}}, "model: .*lora is given, but mode is 'full'"),
        ({"mode": "lora", "lora": {"rank": 0}}, "model.lora.rank: .*got 0"),
        ({"mode": "lora", "lora": {"dropout": 0.1}}, "unknown key 'model.lora.dropout'"),
        ({"mode": "lora", "lora": {"targets": "q"}}, "model.lora.targets: .*'qv' or 'all-linear'"),
        ({"mode": "lora", "lora": {"alpha": 0}}, "model.lora.alpha: .*greater than 0, got 0"),
        ({"dtype": "float16"}, "model.dtype: .*'float32' or 'bfloat16', got 'float16'"),
        ({"attention": "flash"}, "model.attention: .*got 'flash'"),
        ({"attention": "flash_attention_2"}, "model: .*needs dtype bfloat16"),
        ({"gradient_checkpointing": 1}, "model.gradient_checkpointing: .*got 1"),
    ],
)
def test_options_of_the_model_that_do_not_fit_are_named(model, message):
    wrong = changed("model", {"path": "model", **model})
    with pytest.raises(ValueError, match=message) as caught:
        parse_settings(yaml.safe_dump(wrong), origin="run.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["evaluation_documents", "evaluation_batch", "max_new_tokens"])
def test_options_of_the_evaluation_are_counts(key):
    assert parse_settings(yaml.safe_dump(changed(f"task.{key}", 3)), origin="run.yaml")
    with pytest.raises(ValueError, match=f"task.{key}: .*got 0"):
        parse_settings(yaml.safe_dump(changed(f"task.{key}", 0)), origin="run.yaml")


def test_lora_has_defaults():
    settings = parse_settings(
        yaml.safe_dump(changed("model", {"path": "m", "mode": "lora"})), origin="x"
    )
    assert settings.model.lora_or_default.rank == 8
