"""What a private run promises, and that a run which would break it is refused."""

import json
import math

import pytest
import torch
from torch import nn

import dprc
import dprc.train
from dprc.cli import main
from dprc.noise import RandomStreams
from dprc.privacy_card import card_text
from dprc.privacy_target import calibrated_noise, check_target, clipping_options, make_engine
from dprc.train import Run, train
from dprc.updates import PlainUpdate, PrivateUpdate
from tests import runs

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")


@pytest.fixture(autouse=True, scope="module")
def toy():
    """Train the small model on made-up documents."""
    with runs.on_made_up_documents():
        yield


def steps_of(settings, make_update):
    """Take all steps of a run; give the model and the log."""
    workload = runs.workload(settings)
    run = Run(settings, workload, make_update=lambda optimizer: make_update(workload, optimizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for batch in run.batches():
            run.take_step(batch)
    return workload.model, run.log


class TestWithoutNoiseAndBound:
    @pytest.mark.parametrize("options", [{"optimizer": "sgd", "momentum": 0.9}, {}])
    def test_two_passes_are_plain_training_bit_for_bit(self, options):
        changes = {f"training__{name}": value for name, value in options.items()}
        settings = runs.settings(**changes)
        expected = 0.2 * runs.DOCUMENTS  # 16: dividing by it does not round

        def private(workload, optimizer):
            engine = dprc.PrivacyEngine(
                workload.model,
                optimizer,
                max_grad_norm=math.inf,
                noise_multiplier=0.0,
                sample_rate=0.2,
                expected_batch_size=expected,
                privacy_seed=3,
            )
            return PrivateUpdate(engine)

        def plain(workload, optimizer):
            sampling = RandomStreams.from_seed(3).sampling
            return PlainUpdate(optimizer, sampling, sample_rate=0.2, expected_batch_size=expected)

        (one, log), (other, plain_log) = steps_of(settings, private), steps_of(settings, plain)
        assert log.total("nonprivate_batch_size") > 100
        for row, plain_row in zip(log.steps, plain_log.steps, strict=True):
            del row["nonprivate_seconds"], plain_row["nonprivate_seconds"]
            assert row == plain_row
        assert runs.digest(one) == runs.digest(other)
        assert runs.digest(one) != runs.digest(runs.Classifier(settings.seed))


METHODS = {
    "hutchinson": {"estimator": "hutchinson", "num_probes": 16},
    "paper": {
        "estimator": "hutchinson", "num_probes": 16, "sketch": "shared", "analysis": "envelope",
    },
    "hutchpp": {"estimator": "hutchpp", "num_probes": 16, "head_rank": 4},
    "exact": {"estimator": "exact", "schedule": "book_keeping"},
    "auto": {"estimator": "auto", "num_probes": 16},
    "all_exact": {"estimator": "hutchinson", "num_probes": 32},  # no matrix is wider
}  # fmt: skip


class TestEpsilon:
    @pytest.mark.parametrize("name", METHODS)
    def test_is_what_the_command_gives_for_the_recorded_parameters(self, name, tmp_path, capsys):
        calibrated = name == "hutchinson"
        changes = {"privacy__noise_multiplier": None} if calibrated else {}
        settings = runs.settings(method=METHODS[name], training__steps=4, **changes)
        train(settings, tmp_path)
        privacy = json.loads((tmp_path / "metrics.json").read_text())["privacy"]
        words = ["epsilon", "--json", "--estimator", privacy["accounted_estimator"]]
        for key in ("noise_multiplier", "delta", "sample_rate", "steps", "num_probes", "head_rank",
                    "sketch", "analysis"):  # fmt: skip
            if privacy[key] is not None:
                words += [f"--{key.replace('_', '-')}", repr(privacy[key]).strip("'")]
        assert main(words) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["epsilon_upper"] == privacy["epsilon"]
        assert (0.99 * 8 if calibrated else 1) < privacy["epsilon"] <= 8
        assert privacy["steps"] == 4
        assert privacy["sampled_by_loader"] is True
        assert (privacy["accounted_estimator"] == "exact") == (
            name in ("exact", "all_exact") or (name == "auto" and privacy["num_probes"] is None)
        )

    def test_grows_at_logging_points_to_what_is_reported(self, tmp_path):
        heard = runs.Listener()
        train(runs.settings(output__log_every=5), tmp_path, reporter=heard)
        assert list(heard.epsilons) == [5, 10, 12]
        values = list(heard.epsilons.values())
        assert values == sorted(values)
        result = json.loads((tmp_path / "metrics.json").read_text())
        assert values[-1] == result["privacy"]["epsilon"] == heard.evaluations[-1]["epsilon"]

    def test_the_expected_batch_size_is_derived_and_cannot_contradict_the_rate(self, tmp_path):
        train(runs.settings(training__steps=2), tmp_path)
        privacy = json.loads((tmp_path / "metrics.json").read_text())["privacy"]
        assert privacy["expected_batch_size"] == 0.2 * runs.DOCUMENTS
        with pytest.raises(Exception, match="expected_batch_size"):
            runs.settings(training__expected_batch_size=500)

    def test_a_fixed_seed_warns_and_marks_the_run(self, tmp_path):
        with pytest.warns(UserWarning, match="privacy_seed=3 fixes noise"):
            train(runs.settings(training__steps=2), tmp_path / "fixed")
        train(runs.settings(training__steps=2, privacy_seed=None), tmp_path / "secret")
        for name, releasable in (("fixed", False), ("secret", True)):
            result = json.loads((tmp_path / name / "metrics.json").read_text())
            assert result["privacy"]["releasable"] is releasable

    def test_two_secret_runs_differ_and_share_their_start(self, tmp_path):
        rows = []
        for name in ("one", "other"):
            train(runs.settings(training__steps=4, privacy_seed=None), tmp_path / name)
            rows.append(runs.without_times(tmp_path / name / "steps.csv"))
        assert rows[0] != rows[1]


def changed_workload(monkeypatch, **changes):
    """Let train() find a workload with something wrong in it."""

    def prepare(settings):
        workload = runs.workload(settings, model=changes.get("model"))
        others = {name: value for name, value in changes.items() if name != "model"}
        for name, make in others.items():
            others[name] = make(workload)
        return dprc.train.Workload(**{**vars(workload), **others})

    monkeypatch.setattr(dprc.train, "prepare_workload", prepare)


class TestRefusals:
    @pytest.mark.parametrize(
        ("losses", "message"),
        [
            (lambda values: values.mean(), "hides each sample's gradient"),
            (lambda values: values[:, None].expand(-1, 3), "each sample needs one loss"),
            (lambda values: values[:-1], "losses: has .* entries, but"),
            (lambda values: values - values.mean(), "sample"),
        ],
    )
    def test_a_loss_that_is_not_of_single_samples(self, losses, message, tmp_path, monkeypatch):
        def make(workload):
            return lambda batch: losses(workload.losses(batch))

        changed_workload(monkeypatch, losses=make)
        with pytest.raises(dprc.PrivacyError, match=message):
            train(runs.settings(), tmp_path)
        assert not (tmp_path / "metrics.json").exists()

    def test_a_model_that_mixes_samples(self, tmp_path, monkeypatch):
        model = runs.Classifier(0)
        model.head = nn.Sequential(model.head, nn.BatchNorm1d(runs.CLASSES))
        changed_workload(monkeypatch, model=model)
        with pytest.raises(dprc.PrivacyError, match=r"head\.1"):
            train(runs.settings(), tmp_path)

    def test_a_model_without_trained_parameters(self, tmp_path, monkeypatch):
        changed_workload(monkeypatch, model=runs.Classifier(0).requires_grad_(False))
        with pytest.raises((dprc.PrivacyError, ValueError), match="parameter"):
            train(runs.settings(), tmp_path)

    def test_half_precision_which_no_slack_covers(self, tmp_path, monkeypatch):
        changed_workload(monkeypatch, model=runs.Classifier(0).half())
        with pytest.raises(dprc.PrivacyError, match="float16"):
            train(runs.settings(), tmp_path)

    def test_documents_that_cannot_be_drawn_by_index(self, tmp_path, monkeypatch):
        class Stream:
            def __init__(self, documents):
                self._documents = documents

            def __len__(self):
                return len(self._documents)

            def collate(self, items):
                return self._documents.collate(items)

            def __iter__(self):
                return iter(self._documents[i] for i in range(len(self)))

        changed_workload(monkeypatch, train=lambda workload: Stream(workload.train))
        with pytest.raises(TypeError, match="Stream"):
            train(runs.settings(), tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"method__estimator": "hutchinsen"},
                "method.estimator: must be one of .*'hutchinsen'",
            ),
            ({"method__head_rank": 3}, "method.head_rank: only hutchpp has a head"),
            ({"method__analysis": "envelope"}, "envelope.*needs sketch='shared'"),
            ({"method": {"estimator": "exact", "num_probes": 8}}, "method.num_probes: .*leave it"),
            ({"method": {"estimator": "ghost", "sketch": "shared"}}, "method.sketch: .*leave it"),
            ({"method__num_probes": 2}, "4"),
            ({"privacy__noise_multiplier": 0.3}, "0.3 gives epsilon .* above the target 8"),
        ],
    )
    def test_an_impossible_method_before_anything_is_loaded(
        self, changes, message, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(dprc.train, "prepare_workload", None)
        with pytest.raises((ValueError, dprc.PrivacyError), match=message) as caught:
            train(runs.settings(**changes), tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()

    def test_noise_zero_and_an_infinite_bound_are_no_settings_of_a_private_run(self):
        for key, value in (("noise_multiplier", 0.0), ("max_grad_norm", math.inf)):
            with pytest.raises(ValueError, match=key):
                runs.settings(**{f"privacy__{key}": value})

    def test_a_model_that_cannot_be_saved_before_it_is_trained(self, tmp_path):
        with pytest.raises(TypeError, match="Classifier has no save_pretrained"):
            train(runs.settings(output__save_model=True), tmp_path)
        assert not list(tmp_path.iterdir())

    def test_a_diverged_run_names_the_step_and_reports_nothing(self, tmp_path):
        settings = runs.plain(training__learning_rate=1e38, training__optimizer="sgd")
        with pytest.raises(ValueError, match=r"training diverged: .*lower training\.learning_rate"):
            train(settings, tmp_path)
        assert not (tmp_path / "metrics.json").exists()


class TestTarget:
    def test_given_noise_is_used_as_it_is(self):
        settings = runs.settings()
        clipping = clipping_options(settings.method)
        assert calibrated_noise(settings.privacy, settings.training, clipping) == 1.5

    def test_a_model_whose_norms_are_exact_pays_for_exact_norms_only(self):
        settings = runs.settings(
            method={"estimator": "hutchinson", "num_probes": 32}, privacy__noise_multiplier=None
        )
        model = runs.Classifier(0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine = make_engine(model, optimizer, settings, expected_batch_size=16.0)
        exact = calibrated_noise(settings.privacy, settings.training, {"estimator": "exact"})
        assert engine.noise_multiplier == exact

    def test_a_run_without_privacy_has_nothing_to_check(self):
        check_target(runs.plain())
        with pytest.raises(ValueError, match="has no engine"):
            make_engine(runs.Classifier(0), None, runs.plain(), expected_batch_size=1.0)


class TestCard:
    FACTS = {"epsilon": 7.9, "delta": 1e-5, "steps": 3, "num_probes": None}  # noqa: RUF012

    def test_says_whether_the_model_may_be_released(self):
        released = card_text(self.FACTS | {"releasable": True, "sampled_by_loader": True})
        fixed = card_text(self.FACTS | {"releasable": False, "sampled_by_loader": True})
        outside = card_text(self.FACTS | {"releasable": True, "sampled_by_loader": False})
        assert "may be released" in released
        assert "NOT" not in released.replace("Not covered", "")
        assert "NOT RELEASABLE" in fixed
        assert "may be released" not in fixed
        assert "NOT PROVEN" in outside
        for text in (released, fixed, outside):
            assert "ε = 7.9" in text
            assert "δ = 1e-05" in text
            assert "num_probes" not in text
            for word in ("steps.csv", "hyper-parameters", "checkpoints", "test documents", "time"):
                assert word in text, word
