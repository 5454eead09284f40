"""Per-sample losses."""

import pytest
import torch

from dprc import losses
from tests import zoo


def test_classification_loss_is_each_samples_cross_entropy():
    model, inputs = zoo.build("bert"), zoo.batch()
    got = losses.classification_loss(model, inputs)
    for row in range(zoo.BATCH):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        label = alone.pop("labels")
        expected = torch.log_softmax(model(**alone).logits, -1)[0, label].neg()
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-6, atol=0)


def test_missing_labels_and_token_logits_are_refused():
    inputs = zoo.batch()
    with pytest.raises(ValueError, match="has no 'labels'"):
        losses.classification_loss(zoo.build("bert"), {"input_ids": inputs["input_ids"]})
    with pytest.raises(ValueError, match=r"logits \(B, classes\)"):
        losses.classification_loss(zoo.build("llama"), inputs)
