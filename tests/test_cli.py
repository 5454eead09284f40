"""The command line: help that fits a screen, one clear line for bad input."""

import io
import json
import re
import subprocess
import sys

import pytest

from dprc.cli import build_parser, main

COMMANDS = sorted(build_parser()._subparsers._group_actions[0].choices)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert len(text.splitlines()) <= 40
    assert "example" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["prepare-data", "--task", "bcc", "--out", "x"],
            "task: must be one of bbc, .*bbc_offline",
        ),
        (["train", "--config", "missing.yaml", "--out", "x"], "missing.yaml"),
        (["count-flops", "--layers", "8192", "--tokens", "4"], "--layers: each must be INxOUT"),
        (["count-flops", "--layers", "8x2", "--tokens", "0"], "--tokens: .* got '0'"),
        (["plan", "--model", "gpt5", "--tokens", "9", "--batch", "1"], "--model: .* got 'gpt5'"),
        (["plan", "--model", "gpt2", "--tokens", "9", "--batch", "0"], "--batch: .* got 0"),
        (["plan", "--model", "gpt2", "--tokens", "1", "--batch", "1"], "tokens: .* got 1"),
        (
            ["plan", "--model", "gpt2", "--tokens", "9", "--batch", "1", "--memory", "80 bananas"],
            "--memory: must be a size with its unit such as 80GiB or 24GB, got '80 bananas'",
        ),
        (
            ["plan", "--model", "gpt2", "--tokens", "9", "--batch", "1", "--epsilon", "2"],
            "--epsilon, --delta, --sample-rate and --steps",
        ),
        (
            [
                "sweep-noise",
                "--epsilons",
                "2,x",
                "--delta",
                "1e-5",
                "--sample-rate",
                "0.1",
                "--steps",
                "9",
            ],
            "--epsilons: must be numbers separated by commas, got '2,x'",
        ),
        (["envelope", "--lowest", "2"], "--lowest, --highest: .* in order, got 2.0, 1.8"),
        (["envelope", "--points", "1"], "--points: must be at least 2, got 1"),
        (["envelope", "--ranks", "0"], "--ranks: .* got '0'"),
        (["simulate-memory", "--tokens", "9"], "--layers or --model"),
        (["simulate-memory", "--layers", "9", "--tokens", "9"], "--layers: each must be INxOUT"),
        (
            ["simulate-memory", "--layers", "9x9", "--tokens", "9", "--loss", "full"],
            "--loss: is of --model, not of --layers; leave it out, got 'full'",
        ),
        (
            ["simulate-memory", "--layers", "9x9", "--tokens", "9", "--head-rank", "2"],
            "--head-rank: is of --model",
        ),
        (["prepare-model", "--preset", "tiny-llama", "--heads", "3", "--out", "x"], "heads: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error)
    assert not list(tmp_path.iterdir())


def test_settings_that_are_no_text_are_refused_in_one_line(capsys, tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"seed: \xff\xfe")
    words = ["train", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not text in UTF-8" in line


def test_a_misspelt_setting_is_refused_before_anything_slow(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"sede": 1}'))
    assert main(["train", "--config", "-", "--out", "x"]) == 2
    assert "unknown key 'sede'" in capsys.readouterr().err


def test_count_flops_prints_and_writes_the_same_rows(capsys, tmp_path):
    words = ["count-flops", "--layers", "8x6", "--tokens", "5", "--num-probes", "2,3"]
    assert main([*words, "--json", "--out", str(tmp_path / "f.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "f.json").read_text())["metrics"] == printed
    assert len(printed["rows"]) == 2 * 5
    assert main(words) == 0
    assert "hutchinson" in capsys.readouterr().out


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "dprc", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("dprc ")


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from dprc.cli import build_parser; build_parser(); "
        "print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
