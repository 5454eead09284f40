"""What the README shows must run."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) <= 3.0


def test_commands_exist():
    from dprc.cli import build_parser

    known = build_parser()._subparsers._group_actions[0].choices
    named = set(re.findall(r"dprc ([a-z-]+) --", README))
    assert named
    assert named <= set(known)


def test_files_it_points_to_exist():
    root = Path(__file__).parent.parent
    for name in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"docs/[\w/.]+\w", README):
        assert (root / name).exists(), name
