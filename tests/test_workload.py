"""A run's workload: what is learned, what is scored, for each kind of task."""

import json

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

import dprc
from dprc import tasks
from dprc.settings import RunSettings
from dprc.tasks import Dataset, Example
from dprc.train import train
from dprc.workload import prepare_workload
from tests.tiny import byte_tokenizer, save_causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed", "ignore:num_probes")
TRAIN, TEST = 24, 6


class FewRecords:
    """A task under its own name, with short made-up documents."""

    def __init__(self, name):
        self.name, self.kind = name, tasks.get(name).kind

    def read(self):
        def example(number):
            if self.kind == "classification":
                return Example(f"{number}", f"document {number}", number % 2)
            question = "Which number?" if self.kind == "question_answering" else ""
            answers = (f"number {number}",)
            return Example(f"{number}", f"document {number}. " * 40, None, question, answers)

        rows = [example(number) for number in range(TRAIN + TEST)]
        names = ("even", "odd") if self.kind == "classification" else ()
        return Dataset(tuple(rows[:TRAIN]), tuple(rows[TRAIN:]), names, TRAIN + TEST)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    save_causal_lm(root / "model")
    for name in tasks.names():
        tasks.save_dataset(FewRecords(name), root / name)
    return root


def settings(prepared, task, *, model=(), training=(), **options):
    return RunSettings.model_validate(
        {
            "task": {"name": task, "data": str(prepared / task), "max_tokens": 200} | options,
            "model": {"path": str(prepared / "model")} | dict(model),
            "method": {"estimator": "hutchinson", "num_probes": 8},
            "privacy": {
                "epsilon": 8.0,
                "delta": 1e-5,
                "noise_multiplier": 2.0,  # more than enough, and no time spent on calibration
                "max_grad_norm": 1.0,
            },
            "training": {"sample_rate": 0.2, "steps": 3, "learning_rate": 0.01, **dict(training)},
            "seed": 0,
            "privacy_seed": 3,
        }
    )


METRICS = {
    "classification": {"test_accuracy", "nonprivate_train_accuracy", "majority_accuracy"},
    "summarization": {"test_rouge1", "test_rouge2", "test_rougeL", "test_loss"},
    "question_answering": {"test_exact_match", "test_f1", "test_loss"},
}


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_trains_privately_and_reports_its_metrics(prepared, tmp_path, name):
    task = tasks.get(name)
    options = {} if task.kind == "classification" else {"max_new_tokens": 4, "chunk_tokens": 64}
    run = settings(prepared, name, evaluation_documents=3, **options)
    metrics = train(run, tmp_path)
    assert METRICS[task.kind] <= set(metrics)
    assert f"test_{task.main_metric}" in metrics
    assert metrics["test_documents"] == 3
    assert metrics["train_documents"] == TRAIN
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"] == metrics
    assert prepare_workload(run).main_metric == f"test_{task.main_metric}"


def test_lora_trains_privately_and_only_its_factors(prepared, tmp_path):
    model = {"mode": "lora", "lora": {"rank": 12}, "gradient_checkpointing": True}
    run = settings(prepared, "billsum", model=model, evaluation_documents=1, max_new_tokens=2)
    metrics = train(run, tmp_path)
    # For q (16 to 16) and v (16 to 8) of two layers: rank times inputs and outputs.
    assert metrics["trained_parameters"] == 2 * 12 * (16 + 16 + 16 + 8)


class TestGenerativeEvaluation:
    def test_scores_are_those_of_the_texts_that_are_written(self, prepared):
        workload = prepare_workload(settings(prepared, "aclsum_summary", max_new_tokens=5))
        tokenizer, prompt = byte_tokenizer(), tasks.get("aclsum_summary").prompt
        scorer, scores = RougeScorer(["rouge1"], use_stemmer=True), []
        for example in FewRecords("aclsum_summary").read().test:
            before, after = prompt.around(example)
            room = 200 - len(before) - len(after) - 5
            text = before + example.text[:room] + after
            ids = tokenizer(text).input_ids
            assert len(ids) == 195
            with torch.no_grad():
                for _ in range(5):
                    logits = workload.model(input_ids=torch.tensor([ids])).logits
                    ids.append(int(logits[0, -1].argmax()))
                    if ids[-1] == tokenizer.eos_token_id:
                        break
            written = tokenizer.decode(ids[195:], skip_special_tokens=True).strip()
            scores.append(scorer.score(example.answers[0], written)["rouge1"].fmeasure)
        assert workload.evaluate()["test_rouge1"] == pytest.approx(sum(scores) / TEST)

    def test_a_model_that_learned_the_answer_scores_fully(self, prepared):
        # As many new tokens as the answers have: so the prompts are those that were learned.
        run = settings(prepared, "hotpotqa", max_new_tokens=11, evaluation_documents=2)
        workload = prepare_workload(run)
        optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.01)
        batch = workload.test.collate([workload.test[0], workload.test[1]])
        before = workload.evaluate()
        for _ in range(60):
            workload.losses(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = workload.evaluate()
        assert before["test_exact_match"] == 0
        assert after["test_exact_match"] == after["test_f1"] == 1
        assert after["test_loss"] < 0.1 < before["test_loss"]

    def test_the_loss_is_the_mean_over_documents(self, prepared):
        for size in (1, 4):
            workload = prepare_workload(
                settings(prepared, "billsum", max_new_tokens=2, evaluation_batch=size)
            )
            each = []
            for index in range(TEST):
                batch = workload.test.collate([workload.test[index]])
                each.append(float(dprc.losses.causal_lm_loss(workload.model, batch).detach()))
            assert workload.evaluate()["test_loss"] == pytest.approx(sum(each) / TEST, rel=1e-4)

    def test_evaluation_leaves_the_model_as_it_was(self, prepared):
        workload = prepare_workload(settings(prepared, "billsum", max_new_tokens=2))
        workload.model.train()
        state = {name: value.clone() for name, value in workload.model.state_dict().items()}
        assert workload.evaluate() == workload.evaluate()
        assert workload.model.training
        assert all(torch.equal(v, state[name]) for name, v in workload.model.state_dict().items())


class TestRefusals:
    def test_an_answer_length_where_labels_are_predicted(self, prepared):
        with pytest.raises(ValueError, match=r"task.max_new_tokens: task bbc predicts labels"):
            prepare_workload(settings(prepared, "bbc", max_new_tokens=3))

    def test_a_context_without_room_before_anything_is_trained(self, prepared):
        with pytest.raises(ValueError, match=r"task.max_tokens: .* got 60"):
            prepare_workload(settings(prepared, "aclsum_qa", max_tokens=60))
        with pytest.raises(ValueError, match=r"task.max_new_tokens: 190 tokens do not fit"):
            prepare_workload(settings(prepared, "billsum", max_new_tokens=190))
