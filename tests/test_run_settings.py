"""Settings of a run that are easily written wrong: keys given twice, sections left out."""

import json

import pytest
import yaml

from dprc.settings import parse_settings
from tests.test_settings import GOOD


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 0\nseed: 1\n", "duplicate key 'seed' in line 2"),
        ("training:\n  steps: 1\n  steps: 2\n", "duplicate key 'steps' in line 3"),
        ('{"seed": 0, "seed": 0}', "duplicate key 'seed' in line 1"),
    ],
)
def test_a_key_given_twice_is_refused(text, message):
    with pytest.raises(ValueError, match=rf"run\.yaml: {message}"):
        parse_settings(text, origin="run.yaml")


def test_merged_keys_may_be_given_again():
    text = yaml.safe_dump(GOOD) + "defaults: &d {steps: 1}\n"
    text = text.replace("training:\n", "training:\n  <<: {steps: 99, momentum: 0.0}\n")
    with pytest.raises(ValueError, match="unknown key 'defaults'"):
        parse_settings(text, origin="file")
    assert parse_settings(text.partition("defaults")[0], origin="file").training.steps == 12


def test_nothing_needs_to_be_said_about_output():
    output = parse_settings(json.dumps(GOOD), origin="file").output
    assert output.checkpoint_every == 50
    assert output.save_model is True
