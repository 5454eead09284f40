"""An interrupted run ends as an uninterrupted one, or refuses to go on."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import warnings

import pytest
import torch
from safetensors import SafetensorError

import dprc.train
from dprc import checkpoints as checkpoint_files
from dprc import fingerprints
from dprc.checkpoints import CheckpointFolder
from dprc.privacy_target import make_engine
from dprc.termination import Terminated
from dprc.train import train
from tests import runs

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")


@pytest.fixture(autouse=True, scope="module")
def toy():
    """Train the small model on made-up documents, and say what its weights became."""
    models = []

    def prepare(settings):
        workload = runs.workload(settings)
        models.append(workload.model)
        return workload

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dprc.train, "prepare_workload", prepare)
        patched.setattr(fingerprints, "of_code", lambda: {"code": "this"})
        runs.remember_epsilons(patched)
        yield models


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """Give what an uninterrupted run ends with."""
    folder = tmp_path_factory.mktemp("whole")
    with warnings.catch_warnings(action="ignore"):
        train(runs.settings(), folder)
    return outcome(folder, toy[-1])


@pytest.fixture(scope="module")
def begun_once(toy, tmp_path_factory):
    """Give a run that was stopped after step 6; not to be changed."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with warnings.catch_warnings(action="ignore"):
        stopped_after(6, folder, runs.settings())
    return folder


@pytest.fixture
def begun(begun_once, tmp_path):
    """Give a copy of it."""
    return shutil.copytree(begun_once, tmp_path / "begun")


def stopped_after(step, folder, settings):
    """Begin a run and stop it after a step."""

    def terminate(done):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated) as stopped:
        train(settings, folder, reporter=runs.Listener(terminate))
    assert stopped.value.step == step


def outcome(folder, model):
    """Give all that a run ends with, but for the times."""
    result = json.loads((folder / "metrics.json").read_text())
    result["metrics"].pop("train_seconds")
    result.pop("environment")
    result["config"].pop("output")
    evaluations = (folder / "evaluations.csv").read_text()
    return runs.digest(model), result, evaluations, runs.without_times(folder / "steps.csv")


def in_a_child(action):
    """Run something in a process of its own, and return how that ended."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(step, folder, settings, **options):
    """Begin a run that a SIGKILL ends after some step."""

    def kill(done):
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    status = in_a_child(lambda: train(settings, folder, reporter=runs.Listener(kill), **options))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


VARIANTS = {
    "private": runs.settings(),
    "shared": runs.settings(
        method={"estimator": "hutchpp", "num_probes": 16, "head_rank": 4, "sketch": "shared"},
        training__optimizer="sgd",
        training__momentum=0.9,
    ),
    "exact": runs.settings(method={"estimator": "exact"}),
    "plain": runs.plain(),
}


class TestAKilledRun:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_ends_bit_for_bit_as_one_that_was_not(self, variant, toy, tmp_path):
        settings = VARIANTS[variant]
        train(settings, tmp_path / "whole")
        whole = outcome(tmp_path / "whole", toy[-1])
        done = 0
        for step in sorted(random.Random(variant).sample(range(1, 12), 3)):
            if step > done:
                killed_at(step, tmp_path / "cut", settings, resume=True)
                # The steps since the last checkpoint, of which there is one every two, are lost.
                done = (step - 1) // 2 * 2
                assert CheckpointFolder(tmp_path / "cut" / "checkpoints").steps()[-1:] in (
                    [done] * bool(done),
                    [step],
                )
        heard = runs.Listener()
        train(settings, tmp_path / "cut", resume=True, reporter=heard)
        assert heard.started_at > 0
        assert outcome(tmp_path / "cut", toy[-1]) == whole
        assert not (tmp_path / "cut" / "checkpoints").exists()

    def test_draws_its_secret_noise_again_from_the_checkpoint(self, toy, tmp_path):
        settings = runs.settings(privacy_seed=None)
        seen = {}

        def copy_state(step):
            if step == 3:
                seen.update(engine=runs.last_checkpoint(tmp_path / "cut").state["update"])
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Terminated):
            train(settings, tmp_path / "cut", reporter=runs.Listener(copy_state))
        keys = runs.last_checkpoint(tmp_path / "cut").state["update"]["streams"]
        assert keys == seen["engine"]["streams"]
        assert keys["releasable"] is True
        train(settings, tmp_path / "cut", resume=True)
        resumed = outcome(tmp_path / "cut", toy[-1])
        assert resumed[1]["privacy"]["releasable"] is True

        # Uninterrupted, with the same keys put in by hand.
        workload = runs.workload(settings)

        def with_keys(optimizer):
            engine = make_engine(workload.model, optimizer, settings, expected_batch_size=16.0)
            engine.load_state_dict(engine.state_dict() | {"streams": keys})
            return dprc.train.PrivateUpdate(engine)

        run = dprc.train.Run(settings, workload, make_update=with_keys)
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            for batch in run.batches():
                run.take_step(batch)
        assert runs.digest(workload.model) == resumed[0]

    def test_in_the_last_evaluation_only_repeats_that(self, toy, whole, tmp_path):
        settings = runs.settings()
        killed_at(12, tmp_path / "cut", settings)
        train(settings, tmp_path / "cut", resume=True)
        # The last step was killed before its checkpoint was written.
        assert outcome(tmp_path / "cut", toy[-1]) == whole

    def test_in_the_middle_of_a_checkpoint_goes_on_from_the_one_before(
        self, toy, whole, tmp_path, monkeypatch
    ):
        settings = runs.settings()

        def write_half(folder, snapshot):
            if snapshot.step == 6:
                folder.mkdir()
                (folder / "state.pt").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            write(folder, snapshot)

        write = checkpoint_files._write
        monkeypatch.setattr(checkpoint_files, "_write", write_half)
        status = in_a_child(lambda: train(settings, tmp_path / "cut"))
        assert os.WTERMSIG(status) == signal.SIGKILL
        monkeypatch.setattr(checkpoint_files, "_write", write)
        assert (tmp_path / "cut" / "checkpoints" / ".unfinished_6").exists()
        heard = runs.Listener()
        train(settings, tmp_path / "cut", resume=True, reporter=heard)
        assert heard.started_at == 4
        assert outcome(tmp_path / "cut", toy[-1]) == whole
        assert not (tmp_path / "cut" / "checkpoints").exists()


class TestSigterm:
    def test_finishes_the_step_saves_and_says_where(self, toy, whole, tmp_path):
        settings = runs.settings(output__checkpoint_every=None)
        before = signal.getsignal(signal.SIGTERM)
        stopped_after(5, tmp_path / "cut", settings)
        assert signal.getsignal(signal.SIGTERM) == before
        assert CheckpointFolder(tmp_path / "cut" / "checkpoints").steps() == [5]
        assert len(runs.without_times(tmp_path / "cut" / "steps.csv")) == 1 + 5
        train(settings, tmp_path / "cut", resume=True)
        assert outcome(tmp_path / "cut", toy[-1]) == whole

    @pytest.mark.parametrize("already", [False, True])
    def test_does_not_wait_for_an_evaluation_which_is_made_up_for_once(
        self, already, toy, whole, tmp_path, monkeypatch
    ):
        settings = runs.settings(output__checkpoint_every=None)
        evaluate = dprc.train.Run.evaluate

        def evaluate_slowly(run):
            if already:
                evaluate(run)
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it went on")

        with monkeypatch.context() as patched:
            patched.setattr(dprc.train.Run, "evaluate", evaluate_slowly)
            with pytest.raises(Terminated) as stopped:
                train(settings, tmp_path)
        assert stopped.value.step == 8
        heard = runs.Listener()
        train(settings, tmp_path, resume=True, reporter=heard)
        assert [row["step"] for row in heard.evaluations] == [8, 12][already:]
        assert outcome(tmp_path, toy[-1]) == whole


def test_how_often_it_is_evaluated_and_saved_changes_nothing_learned(toy, whole, tmp_path):
    output = {"evaluate_every": 1, "checkpoint_every": 5, "log_every": 12, "save_model": False}
    train(runs.settings(output=output), tmp_path)
    weights, result, evaluations, steps = outcome(tmp_path, toy[-1])
    assert (weights, result, steps) == (whole[0], whole[1], whole[3])
    assert set(whole[2].splitlines()) < set(evaluations.splitlines())


class TestAChangedRun:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"training__learning_rate": 0.04}, "training.learning_rate was 0.05 and is 0.04 now"),
            ({"privacy__noise_multiplier": 2.0}, "privacy.noise_multiplier was 1.5 and is 2.0"),
            ({"seed": 1}, "seed was 0 and is 1 now"),
            ({"privacy_seed": None}, "privacy_seed was 3 and is None now"),
            ({"method": None, "privacy": None}, "method"),
        ],
    )
    def test_of_settings_is_refused_by_name(self, change, named, begun_once):
        with pytest.raises(ValueError, match=f"--resume: .*step 6 is of another run: .*{named}"):
            train(runs.settings(**change), begun_once, resume=True)
        assert CheckpointFolder(begun_once / "checkpoints").steps() == [4, 6]

    def test_of_documents_is_refused(self, begun_once, monkeypatch):
        others = runs.Documents(runs.DOCUMENTS, 0)
        others.labels[17] = (others.labels[17] + 1) % runs.CLASSES
        monkeypatch.setattr(
            dprc.train, "prepare_workload", lambda settings: runs.workload(settings, train=others)
        )
        with pytest.raises(ValueError, match="content of the documents was"):
            train(runs.settings(), begun_once, resume=True)

    def test_of_the_starting_model_is_refused(self, begun_once, monkeypatch):
        monkeypatch.setattr(
            dprc.train,
            "prepare_workload",
            lambda settings: runs.workload(settings, model=runs.Classifier(seed=5)),
        )
        with pytest.raises(ValueError, match="content of the model was"):
            train(runs.settings(), begun_once, resume=True)

    def test_of_code_is_refused_or_starts_anew(self, toy, whole, begun, monkeypatch):
        monkeypatch.setattr(fingerprints, "of_code", lambda: {"code": "other"})
        with pytest.raises(ValueError, match="code was 'this' and is 'other' now"):
            train(runs.settings(), begun, resume=True)
        heard = runs.Listener()
        train(runs.settings(), begun, resume=True, overwrite=True, reporter=heard)
        assert heard.started_at == 0
        assert "code was 'this' and is 'other' now: starting anew" in heard.notes[0]
        assert outcome(begun, toy[-1]) == whole

    def test_of_what_changes_nothing_learned_goes_on_and_is_told(self, begun):
        heard = runs.Listener()
        changed = runs.settings(
            training__max_physical_batch=4, task__data="moved", output__log_every=1
        )
        train(changed, begun, resume=True, reporter=heard)
        assert heard.started_at == 6
        assert any("max_physical_batch was 7 and is 4 now" in note for note in heard.notes)


class TestWhatIsInTheFolder:
    def test_is_not_overwritten_unasked(self, tmp_path):
        settings = runs.settings(training__steps=3)
        stopped_after(2, tmp_path / "cut", settings)
        with pytest.raises(FileExistsError, match="holds a run; go on with --resume"):
            train(settings, tmp_path / "cut")
        train(settings, tmp_path / "cut", overwrite=True)
        metrics = (tmp_path / "cut" / "metrics.json").read_text()
        with pytest.raises(FileExistsError, match="holds a finished run; replace it"):
            train(settings, tmp_path / "cut")
        assert (tmp_path / "cut" / "metrics.json").read_text() == metrics

    def test_if_finished_is_returned_by_resuming(self, toy, tmp_path):
        settings = runs.settings(training__steps=3)
        metrics, loaded = train(settings, tmp_path), len(toy)
        heard = runs.Listener()
        assert train(settings, tmp_path, resume=True, reporter=heard) == metrics
        assert "this run is finished" in heard.notes[0]
        assert len(toy) == loaded
        with pytest.raises(ValueError, match=r"finished run where training\.steps was 3 and is 4"):
            train(runs.settings(training__steps=4), tmp_path, resume=True)
        train(runs.settings(training__steps=4), tmp_path, resume=True, overwrite=True)
        assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["steps"] == 4

    def test_if_nothing_is_started_anew_by_resuming(self, tmp_path):
        heard = runs.Listener()
        train(runs.settings(training__steps=2), tmp_path, resume=True, reporter=heard)
        assert "starting anew" in heard.notes[0]

    def test_does_not_pass_for_the_result_of_the_run_that_replaces_it(self, tmp_path):
        train(runs.settings(training__steps=2), tmp_path)
        killed_at(3, tmp_path, runs.settings(), overwrite=True)
        assert not (tmp_path / "metrics.json").exists()
        assert CheckpointFolder(tmp_path / "checkpoints").steps() == [2]

    def test_survives_a_run_that_cannot_start(self, tmp_path, monkeypatch):
        train(runs.settings(training__steps=2), tmp_path)

        def fail(settings):
            raise FileNotFoundError("no data")

        monkeypatch.setattr(dprc.train, "prepare_workload", fail)
        with pytest.raises(FileNotFoundError):
            train(runs.settings(training__steps=2), tmp_path, overwrite=True)
        assert (tmp_path / "metrics.json").exists()

    def test_is_trained_in_by_one_process(self, tmp_path):
        refused = []

        def train_again(step):
            if step == 1:
                with pytest.raises(BlockingIOError, match="another process trains"):
                    train(runs.settings(), tmp_path, overwrite=True)
                refused.append(step)

        train(runs.settings(training__steps=2), tmp_path, reporter=runs.Listener(train_again))
        assert refused == [1]

    def test_checkpoints_are_for_their_owner_only_and_kept_if_asked(self, tmp_path):
        train(runs.settings(output__keep_checkpoints=True), tmp_path)
        folder = tmp_path / "checkpoints"
        assert CheckpointFolder(folder).steps() == [10, 12]
        for path in folder.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


def flip(path):
    """Change one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


HARMS = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
}
FILES = ("about.json", "log.json", "model.safetensors", "state.pt", "manifest.json")


class TestDamage:
    @pytest.mark.parametrize("harm", HARMS)
    def test_of_any_file_is_found(self, harm, begun):
        folder = CheckpointFolder(begun / "checkpoints")
        for name in FILES:
            path = folder.path(6) / name
            content = path.read_bytes()
            HARMS[harm](path)
            step, damaged = folder.newest_usable()
            assert step == 4, name
            (line,) = damaged
            assert "step_00000006" in line
            assert name == "manifest.json" or name in line
            path.write_bytes(content)
        assert folder.newest_usable() == (6, [])

    def test_of_the_last_one_goes_back_to_the_one_before_with_a_warning(self, toy, whole, begun):
        flip(begun / "checkpoints" / "step_00000006" / "state.pt")
        there = []
        folder = CheckpointFolder(begun / "checkpoints")
        heard = runs.Listener(lambda step: there.append(folder.steps()))
        train(runs.settings(), begun, resume=True, reporter=heard)
        assert heard.started_at == 4
        assert there[:3] == [[4], [4], [4, 6]]  # the damaged one does not count as one of two
        assert heard.notes[0].startswith("WARNING: damaged checkpoints are skipped")
        assert "state.pt differs from its checksum" in heard.notes[0]
        assert outcome(begun, toy[-1]) == whole

    def test_of_all_is_refused_or_started_anew(self, begun):
        for step in (4, 6):
            (begun / "checkpoints" / f"step_{step:08d}" / "log.json").unlink()
        with pytest.raises(
            ValueError, match=r"no checkpoint is usable: .*log\.json is missing"
        ) as e:
            train(runs.settings(), begun, resume=True)
        assert "\n" not in str(e.value)
        heard = runs.Listener()
        train(runs.settings(), begun, resume=True, overwrite=True, reporter=heard)
        assert heard.started_at == 0

    def test_code_in_a_checkpoint_is_not_executed(self, begun):
        folder = CheckpointFolder(begun / "checkpoints")

        class Harmful:
            def __reduce__(self):
                return os.mkdir, (str(begun / "executed"),)

        torch.save({"update": Harmful()}, folder.path(6) / "state.pt")
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            folder.load(6)
        assert not (begun / "executed").exists()


class TestFailures:
    def test_a_full_disk_leaves_the_checkpoints_before(self, toy, whole, tmp_path, monkeypatch):
        settings = runs.settings()
        sync, calls = os.fsync, []

        def full_disk(descriptor):
            calls.append(descriptor)
            if len(calls) > 30:
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left on device") as caught:
            train(settings, tmp_path / "cut")
        monkeypatch.setattr(os, "fsync", sync)
        folder = CheckpointFolder(tmp_path / "cut" / "checkpoints")
        step, damaged = folder.newest_usable()
        assert step
        assert not damaged
        assert f"the last one is of step {step}" in str(caught.value)
        assert not list(folder.folder.glob(".unfinished*"))
        train(settings, tmp_path / "cut", resume=True)
        assert outcome(tmp_path / "cut", toy[-1]) == whole

    def test_results_that_cannot_be_written_are_made_from_what_was_saved(
        self, toy, whole, tmp_path, monkeypatch
    ):
        def full_disk(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(dprc.train, "write_result", full_disk)
            with pytest.raises(OSError, match=r"No space left.*step 12 is saved: go on with --res"):
                train(runs.settings(), tmp_path)
        heard = runs.Listener()
        train(runs.settings(), tmp_path, resume=True, reporter=heard)
        assert heard.started_at == 12
        assert outcome(tmp_path, toy[-1]) == whole

    @pytest.mark.parametrize("limit", [20, 3000, 6000])
    def test_a_file_that_cannot_be_written_whole_is_told(self, limit, begun):
        """The system stops the writing of tensors, of which libraries tell in their own ways."""
        folder = CheckpointFolder(begun / "checkpoints")
        snapshot = folder.load(6)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match="could not be written") as caught:
                folder.save(
                    checkpoint_files.Snapshot(
                        8, snapshot.about, snapshot.log, snapshot.parameters, snapshot.state
                    )
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        # Three places: a file of text, the parameters, the state.
        kinds = {20: OSError, 3000: SafetensorError}
        assert isinstance(caught.value.__cause__, kinds.get(limit, Exception))
        assert "File too large" in str(caught.value)  # the system's own words
        assert "the last one is of step 6" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert folder.newest_usable() == (6, [])
        assert folder.steps() == [4, 6]

    def test_out_of_memory_says_what_to_lower_and_goes_on(self, toy, tmp_path, monkeypatch):
        settings = runs.settings()

        def prepare(settings):
            workload = runs.workload(settings)
            calls = []

            def losses(batch):
                calls.append(batch)
                if len(calls) == 12:
                    torch.empty(2**60)  # torch's own error
                return workload.losses(batch)

            return dprc.train.Workload(**{**vars(workload), "losses": losses})

        with monkeypatch.context() as patched:
            patched.setattr(dprc.train, "prepare_workload", prepare)
            with pytest.raises(MemoryError, match=r"max_physical_batch=7\. Lower it"):
                train(settings, tmp_path)
        steps = CheckpointFolder(tmp_path / "checkpoints").steps()
        assert steps
        heard = runs.Listener()
        lower = runs.settings(training__max_physical_batch=3)
        train(lower, tmp_path, resume=True, reporter=heard)
        assert heard.started_at == steps[-1]

    def test_another_error_of_torch_is_not_taken_for_it(self, tmp_path, monkeypatch):
        def prepare(settings):
            workload = runs.workload(settings)
            return dprc.train.Workload(
                **{**vars(workload), "losses": lambda batch: torch.ones(2) @ torch.ones(3)}
            )

        monkeypatch.setattr(dprc.train, "prepare_workload", prepare)
        with pytest.raises(RuntimeError, match="inconsistent"):
            train(runs.settings(), tmp_path)
