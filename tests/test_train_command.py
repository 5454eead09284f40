"""``dprc train`` as it is called: one clear line and the right exit code for each end."""

import errno
import json
import os
import signal

import pytest
import yaml

import dprc.train
from dprc.checkpoints import CheckpointFolder
from dprc.cli import main
from tests import runs

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")


@pytest.fixture(autouse=True, scope="module")
def toy():
    """Train the small model on made-up documents."""
    with runs.on_made_up_documents():
        yield


@pytest.fixture
def command(tmp_path):
    """Write a settings file and give the words of the command."""
    file = tmp_path / "run.yaml"

    def write(*flags, **changes):
        file.write_text(yaml.safe_dump(runs.settings(**changes).model_dump()))
        return ["train", "--config", str(file), "--out", str(tmp_path / "out"), *flags]

    return write


def signalled(monkeypatch, number, step):
    """Let the process get a signal in a step."""
    take_step = dprc.train.Run.take_step

    def take_step_and_signal(run, batch):
        if run.done + 1 == step:
            os.kill(os.getpid(), number)
        take_step(run, batch)

    monkeypatch.setattr(dprc.train.Run, "take_step", take_step_and_signal)


def test_a_run_says_what_it_reached_and_where(command, tmp_path, capsys):
    assert main(command(output__log_every=6)) == 0
    said = capsys.readouterr()
    result = json.loads((tmp_path / "out" / "metrics.json").read_text())
    accuracy, epsilon = result["metrics"]["test_accuracy"], result["privacy"]["epsilon"]
    assert said.out == (
        f"test_accuracy {accuracy:.4f}, epsilon {epsilon:.4g} -> {tmp_path}/out/metrics.json\n"
    )
    lines = said.err.splitlines()
    assert [line.split()[3] for line in lines] == ["6/12", "8/12", "12/12", "12/12"]
    assert set(result) == {"config", "metrics", "privacy", "environment", "valid"}
    assert main(command("--resume")) == 0
    assert "this run is finished" in capsys.readouterr().err


def test_sigterm_ends_with_143_and_says_how_to_go_on(command, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGTERM, step=5)
        assert main(command()) == 143
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith("dprc train: terminated after step 5, which is saved. Go on with: dprc")
    words = last.partition("Go on with: dprc ")[2].split()
    assert CheckpointFolder(tmp_path / "out" / "checkpoints").steps()[-1] == 5
    assert main(words) == 0
    assert (tmp_path / "out" / "metrics.json").exists()


def test_control_c_ends_with_130(command, tmp_path, capsys, monkeypatch, request):
    # A shell's background jobs ignore SIGINT, and so does a Python that one of them starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGINT, step=5)
        assert main(command()) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert "interrupted; no result was written" in last
    assert last.endswith("--resume")
    assert CheckpointFolder(tmp_path / "out" / "checkpoints").steps() == [2, 4]


def test_a_folder_that_holds_a_run_ends_with_2(command, capsys):
    assert main(command(training__steps=2)) == 0
    capsys.readouterr()
    assert main(command(training__steps=2)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds a finished run" in line
    assert "--overwrite" in line
    assert main(command("--overwrite", training__steps=3)) == 0


def test_a_changed_setting_ends_with_2_by_name(command, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGTERM, step=3)
        main(command())
    capsys.readouterr()
    assert main(command("--resume", privacy__max_grad_norm=2.0)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "privacy.max_grad_norm was 1.0 and is 2.0 now" in line


def test_a_full_disk_ends_with_2_and_one_line(command, tmp_path, capsys, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = command()
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFolder, "remove", lambda folder: None)
        patched.setattr("dprc.checkpoints.os.fsync", fail)
        assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last


def test_out_of_memory_ends_with_2(command, capsys, monkeypatch):
    def fail(run, batch):
        raise MemoryError("out of memory in step 1")

    monkeypatch.setattr(dprc.train.Run, "take_step", fail)
    assert main(command()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "dprc train: error: out of memory in step 1"
    )


def test_tensorboard_without_its_package_ends_with_2_before_anything(command, tmp_path, capsys,
                                                                     monkeypatch):  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    assert main(command(output__tensorboard=True)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "output.tensorboard: needs the package 'tensorboard'" in line
    assert not (tmp_path / "out").exists()
