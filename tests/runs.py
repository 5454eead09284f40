"""A run that takes a moment: a small model with dropout on made-up documents, and its settings."""

import copy
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dprc.train
from dprc import fingerprints
from dprc.accounting import Accountant
from dprc.checkpoints import CheckpointFolder
from dprc.settings import RunSettings
from dprc.workload import Workload

DOCUMENTS, CLASSES, VOCABULARY = 80, 3, 40
RAW = {
    "task": {"name": "toy", "data": "data", "max_tokens": 12},
    "model": {"path": "model"},
    "method": {"estimator": "hutchinson", "num_probes": 16},
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 1.0, "noise_multiplier": 1.5},
    "training": {
        "sample_rate": 0.2,
        "steps": 12,
        "learning_rate": 0.05,
        "warmup_steps": 2,
        "schedule": "cosine",
        "max_physical_batch": 7,
    },
    "output": {"checkpoint_every": 2, "evaluate_every": 8, "log_every": 12, "save_model": False},
    "seed": 0,
    "privacy_seed": 3,
}


def settings(**changes):
    """Give the settings above; ``training__steps=5`` changes a key within."""
    raw = copy.deepcopy(RAW)
    for name, value in changes.items():
        *parents, last = name.split("__")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    return RunSettings.model_validate(raw)


def plain(**changes):
    """Give the settings of a run without privacy."""
    return settings(method=None, privacy=None, **changes)


class Documents:
    """Made-up documents whose label can be read from their words."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        self.labels = generator.integers(CLASSES, size=count)
        self.ids = [
            torch.from_numpy(generator.integers(label, VOCABULARY, size=generator.integers(4, 12)))
            for label in self.labels
        ]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], int(self.labels[index])

    def collate(self, items):
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
        return {"input_ids": ids, "labels": torch.tensor([label for _, label in items])}


class Classifier(nn.Module):
    """Frozen embedding, a layer wider than the probes, dropout, a head."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, 24).requires_grad_(False)
            self.layer, self.head = nn.Linear(24, 32), nn.Linear(32, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids):
        hidden = torch.tanh(self.layer(self.embedding(input_ids))).mean(1)
        return self.head(self.dropout(hidden))


def workload(run_settings, model=None, train=None):
    """Give what a run trains."""
    model = Classifier(run_settings.seed) if model is None else model
    train, test = Documents(DOCUMENTS, 0) if train is None else train, Documents(30, 1)

    def losses(batch):
        logits = model(batch["input_ids"])
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    @torch.no_grad()
    def evaluate():
        torch.rand(1)  # whatever an evaluation draws must not reach training
        model.eval()
        whole = test.collate([test[i] for i in range(len(test))])
        right = model(whole["input_ids"]).argmax(-1) == whole["labels"]
        return {"test_accuracy": float(right.float().mean())}

    return Workload(model, None, train, test, losses, evaluate, "test_accuracy")


class Listener:
    """A reporter that keeps what it hears, and does something after a step."""

    def __init__(self, after_step=lambda step: None):
        self.notes, self.started_at, self.evaluations = [], None, []
        self.steps, self.epsilons = [], {}
        self._after_step = after_step

    def started(self, done, steps):
        self.started_at = done

    def stepped(self, row, *, log, epsilon):
        self.steps.append(row["step"])
        if log:
            self.epsilons[row["step"]] = epsilon
        self._after_step(row["step"])

    def evaluated(self, row, main_metric):
        self.evaluations.append(row)

    def noted(self, text):
        self.notes.append(text)

    def finished(self):
        pass


def remember_epsilons(patched):
    """Compute each epsilon once for all runs of a module: the same steps cost the same."""
    answers, compute = {}, Accountant.epsilon

    def epsilon(accountant, delta, **options):
        key = (repr(accountant.state_dict()), delta, *options.items())
        if key not in answers:
            answers[key] = compute(accountant, delta, **options)
        return answers[key]

    patched.setattr(Accountant, "epsilon", epsilon)


@contextmanager
def on_made_up_documents():
    """Let ``train`` train the small model on made-up documents."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dprc.train, "prepare_workload", workload)
        remember_epsilons(patched)
        yield


def without_times(path: Path) -> list[str]:
    """Give the lines of steps.csv without the seconds, which no two runs share."""
    return [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()]


def last_checkpoint(folder: Path):
    """Give the last checkpoint of a run."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    return checkpoints.load(checkpoints.steps()[-1])


def digest(model) -> str:
    """Give a hash of all parameters, bit for bit."""
    return fingerprints.of_model(model)
