"""Code blocks of Markdown pages: found, checked without running, run page by page."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jsonschema
import yaml
from packaging.requirements import Requirement

from dprc.cli import build_parser, main
from dprc.settings import RunSettings, parse_settings

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_AT_MOST = re.compile(r"^print\(.*\)  # at most ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str  # path from the root
    line: int
    language: str
    title: str  # of ```yaml title="run.yaml", else empty
    text: str
    follows: str  # language of the block right before, with nothing but blank lines between

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    @property
    def key(self):
        """Name the block in lists of exceptions; a line may move, its first words hardly."""
        return f"{self.page}: {self.text.splitlines()[0]}"

    @property
    def is_output(self):
        return self.language == "text" and self.title == "output"


def pages():
    """List the pages whose blocks are tested."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read_blocks(text, page):
    """Find the blocks of a page; a fence that is not closed is an error."""
    blocks, opened, inside, before, between = [], None, [], "", True
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, start, inside = fence, number, []
        elif opened is None:
            between = between and not line.strip()
        elif fence and fence["fence"].startswith(opened["fence"]) and not fence["info"].strip():
            language, _, rest = opened["info"].strip().partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            text = textwrap.dedent("\n".join(inside))
            follows = before if between else ""
            blocks.append(Block(page, start, language, title[1] if title else "", text, follows))
            opened, before, between = None, language, True
        else:
            inside.append(line)
    if opened is not None:
        raise AssertionError(f"{page}:{start}: the block is not closed")
    return blocks


def blocks_of(page):
    return read_blocks((ROOT / page).read_text(encoding="utf-8"), page)


# --- shell ----------------------------------------------------------------------------------------


def commands(block):
    """List the commands of a bash block: continued lines joined, comments and blanks dropped."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [command for command in found if command]


def transcript(block):
    """List (command, output) of a console block, whose commands start with "$ "."""
    pairs = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            pairs.append((shlex.join(shlex.split(line[2:])), []))
        else:
            pairs[-1][1].append(line)
    return [(command, "\n".join(output)) for command, output in pairs]


def check_command(command):
    """Check a command as far as one can without running it."""
    name, *words = shlex.split(command)
    own_tool = name.startswith(".venv/bin/")
    name = name.removeprefix(".venv/bin/")
    if name == "dprc":
        try:
            build_parser().parse_args(words)
        except SystemExit as stop:
            raise AssertionError(f"dprc does not understand: {command}") from stop
    elif name == "torchrun":
        from torch.distributed.run import get_args_parser

        started = get_args_parser().parse_args(words)
        inner = [started.training_script, *started.training_script_args]
        own = started.module and inner[0] == "dprc"
        check_command(shlex.join(inner if own else ["python", *["-m"] * started.module, *inner]))
    elif name == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif [name, *words[:1]] == ["pip", "install"]:
        for option, word in pairwise(words):
            if option == "-r":
                assert (ROOT / word).is_file(), f"{word} of: {command}"
            elif not word.startswith("-"):
                _check_requirement(word)
    elif name == "snakemake":
        from snakemake.cli import get_argument_parser

        get_argument_parser().parse_args(words)
        for word in words:
            if "/" in word and not word.startswith("results/"):
                assert (ROOT / word).exists(), f"{word} of: {command}"
    elif name == "python" and words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
    elif name == "python":
        assert (ROOT / words[0]).is_file(), words[0]
    elif own_tool:
        assert shutil.which(name, path=Path(sys.executable).parent), name
    else:
        assert (ROOT / name).is_file(), f"nothing here can check: {command}"
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def _check_requirement(word):
    """Check that a package is another's, or this one with extras that it has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    requirement = Requirement(f"dprc{word[1:]}" if word.startswith(".") else word)
    if requirement.name == "dprc":
        assert requirement.extras <= set(extras), word


def run_dprc(command):
    """Run a dprc command in this process; return what it prints on standard output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(shlex.split(command)[1:])
    assert code == 0, f"exit code {code}: {command}"
    return printed.getvalue()


# --- settings -------------------------------------------------------------------------------------


def check_settings(block):
    """Validate settings of a run, some of their top-level keys, or a part of a configuration."""
    raw = yaml.safe_load(block.text)
    assert isinstance(raw, dict), f"{block.place}: no settings"
    if not set(raw) <= set(RunSettings.model_fields):
        _check_configuration(block, raw)
        return
    if {"task", "training"} <= set(raw):
        parse_settings(block.text, origin=block.place)
        return
    # Missing sections are taken from a run that is right, so that the given ones are judged alone.
    whole = {
        "task": {"name": "bbc", "data": "data", "max_tokens": 8},
        "model": {"path": "model"},
        "method": {"estimator": "exact"},
        "privacy": {"epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0},
        "training": {"sample_rate": 0.1, "steps": 1, "learning_rate": 0.1},
        "seed": 0,
    }
    kept = yaml.safe_dump({key: value for key, value in whole.items() if key not in raw})
    parse_settings(f"{kept}{block.text}", origin=block.place)


def _check_configuration(block, raw):
    """Ask the schema of the workflow's configuration, wherever it knows all these keys."""
    schema = yaml.safe_load((ROOT / "workflows/schemas/config.schema.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    complaints = []
    for place in _objects(schema):
        if set(raw) <= set(place["properties"]):
            # A part of a configuration: what is there is judged, what is missing is not.
            part = {"properties": place["properties"], "$defs": schema["$defs"]}
            complaints.append([e.message for e in validator.evolve(schema=part).iter_errors(raw)])
    assert [] in complaints, f"{block.place}: no settings of a run or of the workflow: {complaints}"


def _objects(schema):
    """Yield the parts of a schema that describe an object with known keys."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for part in schema.values():
            yield from _objects(part)


# --- pages ----------------------------------------------------------------------------------------


def check_block(block, illustrations):
    """Check a block without running it; one of a language without a rule is an error."""
    if block.language == "python":
        compile(block.text, block.place, "exec")
    elif block.language == "bash":
        for command in commands(block):
            check_command(command)
    elif block.language == "console":
        assert block.text.startswith("$ "), f"{block.place}: begins with no command"
        for command, _ in transcript(block):
            assert command.startswith("dprc "), f"{block.place}: only dprc is run: {command}"
            check_command(command)
    elif block.language == "yaml":
        check_settings(block)
    elif block.is_output:
        assert block.follows == "python", f"{block.place}: the output of which block?"
    else:
        assert block.key in illustrations, (
            f"{block.place}: no rule for a block of language {block.language!r}"
        )


def assert_prints(expected, printed, place):
    """Compare output with what a page shows; "..." stands for anything."""
    wanted, got = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        for text in (expected, printed)
    )
    pattern = re.escape(wanted).replace(re.escape("..."), ".*?")
    assert re.fullmatch(pattern, got, re.DOTALL), f"{place} shows\n{wanted}\nbut this came:\n{got}"


def check_bounds(block, printed):
    """Compare the last numbers printed with what `print(…)  # at most 3.0` promises."""
    bounds = _AT_MOST.findall(block.text)
    lines = printed.splitlines()[len(printed.splitlines()) - len(bounds) :]
    assert len(lines) == len(bounds), f"{block.place}: prints too little"
    for bound, line in zip(bounds, lines, strict=True):
        assert 0 < float(line) <= float(bound), f"{block.place}: {line} > {bound}"


def run_page(blocks, folder, *, not_run=()):
    """Run the blocks of a page in order, in a folder, with one namespace.

    Args:
        blocks: Of one page.
        folder: Where files go: an empty one, or with what the page says is there.
        not_run: Commands, and keys of blocks, that are only checked.
    """
    namespace, printed = {"__name__": "__main__"}, ""
    with contextlib.chdir(folder), _environment():
        for block in blocks:
            if block.key in not_run:
                continue
            if block.language == "python":
                caught = io.StringIO()
                with contextlib.redirect_stdout(caught):
                    exec(compile(block.text, block.place, "exec"), namespace)
                printed = caught.getvalue()
                check_bounds(block, printed)
            elif block.is_output:
                assert_prints(block.text, printed, block.place)
            elif block.language == "bash":
                for command in commands(block):
                    if command.startswith("dprc ") and command not in not_run:
                        run_dprc(command)
            elif block.language == "console":
                for command, output in transcript(block):
                    if command not in not_run:
                        assert_prints(output, run_dprc(command), block.place)
            elif block.title:
                Path(block.title).write_text(block.text + "\n", encoding="utf-8")


@contextlib.contextmanager
def _environment():
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
