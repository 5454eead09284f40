"""Every code block of README, CONTRIBUTING and docs/ runs, or is checked as far as it can be.

Python runs page by page, in order, in one namespace; what a page shows as output is compared.
`dprc` commands run as printed, but for those below. Other commands are checked without running:
targets of make, options of snakemake, extras of pip, files and modules that are named. Settings are
validated. A block of a language without a rule is an error, so that none escapes.
"""

import json
import random
import re
import subprocess

import pytest

from tests.code_blocks import (
    ROOT,
    assert_prints,
    blocks_of,
    check_block,
    commands,
    pages,
    read_blocks,
    run_dprc,
    run_page,
    transcript,
)

PAGES = pages()
# Blocks that show something else than code, as "page: first line".
ILLUSTRATIONS = {
    "README.md: dprc/             the library and the `dprc` command",
    "docs/tasks.md: words before | document | words after (with the question) | answer | end",
}
# Commands, and Python blocks as "page: first line", that are parsed and not run: what they need.
ONLY_PARSED = {
    "dprc audit --estimator hutchinson --sketch shared": "minutes; tests/test_audit.py is quicker",
    "dprc audit --estimator exact --sample-rate 0.2 --json": "minutes",
    "dprc compare-peers --tokens 2048 --modes all": "an hour",
    "dprc compare-peers --settings all --modes all --rounds 0 --no-memory --tokens 64": "minutes",
    "dprc compare-peers --grid --out grid.json": "many hours",
    "dprc compare-peers --tokens 2048 --modes all --rounds 5 --threads 1 --out "
    "docs/measurements/peers_cpu.json": "an hour",
    "dprc compare-peers --settings all --modes all --rounds 0 --no-memory --tokens 64 "
    "--hidden-size 128 --layers 2 --out docs/measurements/peers_checked.json": "minutes",
    "dprc profile-layer --in-features 8192 --out-features 2048 --tokens 4096 --estimator "
    "exact,tiled,ghost,hutchinson,hutchpp,hutchpp_r2_k26 --sketch shared": "minutes",
    "dprc measure-norm-error --model smollm2-135m --data results/data/bbc_offline --tokens 512": (
        "minutes"
    ),
    "dprc simulate-memory --model llama-3.2-1b --tokens 4096 --out memory.json": "minutes",
    "dprc prepare-data --task billsum --source DIR --out data/billsum": "needs the hub's files",
    "dprc prepare-model --preset smollm2-135m --out models/smollm2": "writes half a gigabyte",
    "dprc train --config papers.yaml --out runs/papers": "hours, as it is",
    "docs/distributed.md: import torch": "torchrun; tests/test_distributed.py does the same",
}
# Pages whose blocks take more than a few seconds together; the fast set only checks them.
SLOW_PAGES = {
    "docs/choosing.md",
    "docs/guarantee.md",
    "docs/latency.md",
    "docs/profiling.md",
    "docs/tasks.md",
    "docs/training.md",
    "docs/tutorials/causal_lm.md",
    "docs/tutorials/classification.md",
}
# The same for single commands of the other pages.
SLOW_COMMANDS = {
    "dprc calibrate --epsilon 2 --delta 1e-5 --sample-rate 0.01 --steps 1000 --compare",
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_well_formed(page):
    for block in blocks_of(page):
        check_block(block, ILLUSTRATIONS)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SLOW_PAGES])
def test_blocks_run(page, tmp_path):
    run_page(blocks_of(page), tmp_path, not_run={*ONLY_PARSED, *SLOW_COMMANDS})


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page in SLOW_PAGES])
def test_blocks_of_slow_pages_run(page, tmp_path):
    BEFORE.get(page, lambda folder: None)(tmp_path)
    run_page(blocks_of(page), tmp_path, not_run=ONLY_PARSED)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(SLOW_COMMANDS))
def test_slow_commands_of_fast_pages_run(command):
    assert run_dprc(command)


def test_every_exception_is_needed():
    found = [block for page in PAGES for block in blocks_of(page)]
    named = {command for block in found if block.language == "bash" for command in commands(block)}
    keys = {block.key for block in found}
    assert set(ONLY_PARSED) <= named | keys
    assert named >= SLOW_COMMANDS
    assert keys >= ILLUSTRATIONS
    assert set(PAGES) >= SLOW_PAGES | set(BEFORE)


def test_the_folders_that_the_readme_lists_exist():
    listing = next(block for block in blocks_of("README.md") if block.key in ILLUSTRATIONS)
    names = re.findall(r"^(\S+) ", listing.text, re.MULTILINE)
    assert len(names) > 5
    assert [name for name in names if name != "results/" and not (ROOT / name).exists()] == []


# --- what a page takes for granted ----------------------------------------------------------------


def write_mail(folder, train, test):
    """Write made-up messages of two classes, no two alike."""
    generator = random.Random(0)
    folder.mkdir()
    for split, count in (("train", train), ("test", test)):
        rows = [
            {
                "text": " ".join(f"w{generator.randrange(500 * (n % 2), 1000)}" for _ in range(20)),
                "label": ("ham", "spam")[n % 2],
            }
            for n in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)


def before_tasks(folder):
    """Put documents where the page says that the reader's are."""
    write_mail(folder / "DIR", 950, 120)


def before_training(folder):
    """Make the two finished runs whose models the page loads: adapters, and a classifier."""
    write_mail(folder / "mail", 60, 20)
    summaries = folder / "summaries"
    summaries.mkdir()
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (folder / "mail" / f"{split}.jsonl").open()]
        lines = (json.dumps({"text": row["text"], "summary": row["label"]}) for row in rows)
        (summaries / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    sizes = "--train-documents 40 --test-documents 10"
    mail, text, tiny = folder / "data_mail", folder / "data_text", folder / "tiny"
    run_dprc(
        f"dprc prepare-data --task own_classification --source {folder / 'mail'} --labels ham,spam "
        f"{sizes} --out {mail}"
    )
    run_dprc(f"dprc prepare-data --task own_summary --source {summaries} {sizes} --out {text}")
    run_dprc(f"dprc prepare-model --preset tiny-llama --hidden-size 32 --heads 2 --out {tiny}")
    common = {
        "method": {"estimator": "exact"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 1.0},
        "training": {"sample_rate": 0.2, "steps": 2, "learning_rate": 0.01},
        "seed": 0,
    }
    classifier = {
        "task": {"name": "own_classification", "data": str(mail), "max_tokens": 16},
        "model": {"path": str(tiny)},
    }
    adapters = {
        "task": {
            "name": "own_summary",
            "data": str(text),
            "max_tokens": 120,
            "max_new_tokens": 4,
            "evaluation_documents": 2,
        },
        "model": {"path": str(tiny), "mode": "lora", "lora": {"rank": 4}},
    }
    for name, own in (("mail", classifier), ("summaries", adapters)):
        (folder / f"{name}.json").write_text(json.dumps(own | common))
        run_dprc(f"dprc train --config {folder / name}.json --out {folder / 'runs' / name}")


BEFORE = {"docs/tasks.md": before_tasks, "docs/training.md": before_training}


# --- the mechanism itself -------------------------------------------------------------------------


def page_of(text):
    return read_blocks(text, "page.md")


def test_blocks_are_found_in_order_with_what_they_follow():
    first, second, third = page_of(
        '# A\n```python\na = 1\n```\n\n```text title="output"\n1\n```\nWords.\n\n'
        '  ````yaml title="x.yaml"\n  a: ```\n  ````\n'
    )
    assert (first.language, first.text, first.line, first.follows) == ("python", "a = 1", 2, "")
    assert (second.title, second.is_output, second.follows) == ("output", True, "python")
    assert (third.title, third.text, third.follows) == ("x.yaml", "a: ```", "")


def test_a_block_that_is_not_closed_is_noticed():
    with pytest.raises(AssertionError, match="not closed"):
        page_of("```python\na = 1\n")


@pytest.mark.parametrize(
    "text",
    [
        "```pyton\nprint(1)\n```",
        "```\nprint(1)\n```",
        "```python\nprint(\n```",
        "```bash\ndprc calibrate --epsilom 2\n```",
        "```bash\ndprc calibrat\n```",
        "```bash\nmake resluts\n```",
        "```bash\npip install '.[hff]'\n```",
        "```bash\nsnakemake --coresss 2\n```",
        "```bash\nsnakemake --configfile workflows/config/none.yaml\n```",
        "```bash\npython scripts/none.py\n```",
        "```bash\npython -m dprc_none\n```",
        "```bash\n.venv/bin/pytset\n```",
        "```bash\n.venv/bin/pip install -r envs/none.lock\n```",
        "```bash\nrm -rf /\n```",
        "```bash\ntorchrun --nproc-per-noed 2 -m dprc train --config a --out b\n```",
        "```bash\ntorchrun --nproc-per-node 2 -m dprc train --confg a --out b\n```",
        "```bash\ntorchrun none.py\n```",
        "```console\n$ make test\n```",
        "```yaml\ntaks: {}\n```",
        "```yaml\nprivacy: { epsilon: -1, delta: 1e-5, max_grad_norm: 1.0 }\n```",
        "```yaml\nestimator: exact\nnum_probs: 32\n```",
        "```yaml\nestimator: exakt\nnum_probes: 32\n```",
        '```text title="output"\n1\n```',
    ],
)
def test_a_malformed_block_is_noticed(text):
    (block,) = page_of(text)
    with pytest.raises((AssertionError, ValueError, SyntaxError, SystemExit, OSError,
                        subprocess.CalledProcessError)):  # fmt: skip
        check_block(block, ILLUSTRATIONS)


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```",
        "```python\na = 1\n```\n```python\nassert a == 2\n```",
        '```python\nprint(1)\n```\n```text title="output"\n2\n```',
        "```python\nprint(3.5)  # at most 3.0\n```",
        "```python\nif False:\n    a = 1\nprint(2, end='')  # at most 3.0\n1 / 0\n```",
        "```bash\ndprc epsilon --noise-multiplier 0 --delta 1e-5 --sample-rate 0.1 --steps 1\n```",
        "```console\n$ dprc --version\ndprc 99\n```",
    ],
)
def test_a_block_that_does_not_do_what_it_says_is_noticed(text, tmp_path):
    with pytest.raises((AssertionError, ZeroDivisionError, SystemExit)):
        run_page(page_of(text), tmp_path)


def test_blocks_of_a_page_share_names_and_files(tmp_path):
    run_page(
        page_of(
            '```yaml title="a.yaml"\nx: 1\n```\n```python\na = open("a.yaml").read()\n```\n'
            '```python\nprint(a, 5, 6)\n```\n```text title="output"\nx: 1\n... 6\n```\n'
        ),
        tmp_path,
    )


def test_dots_stand_for_anything_and_nothing_else_does():
    assert_prints("a\n...\nd", "a\nb\nc\nd\n", "here")
    with pytest.raises(AssertionError):
        assert_prints("a.c", "abc", "here")


def test_commands_are_joined_and_comments_dropped():
    (block,) = page_of("```bash\n# first\nmake test   # the tests\ndprc a \\\n    --b 'c d'\n```")
    assert commands(block) == ["make test", "dprc a --b 'c d'"]
    (block,) = page_of("```console\n$ dprc a\nx\n\n$ dprc b\n```")
    assert transcript(block) == [("dprc a", "x\n"), ("dprc b", "")]


def test_what_is_right_is_let_through():
    for text in (
        "```bash\nmake lint\ntorchrun --standalone -m dprc train --config a --out b --resume\n```",
        "```bash\ntorchrun --nproc-per-node 2 scripts/gpu_checks.py --out a\n```",
        "```yaml\nestimator: hutchpp\nnum_probes: 26\nhead_rank: 2\n```",
        "```yaml\noutput: { log_every: 1 }\nseed: 3\n```",
    ):
        (block,) = page_of(text)
        check_block(block, ILLUSTRATIONS)
