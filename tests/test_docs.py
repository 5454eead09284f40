"""What the pages of docs/ name must exist."""

import ast
import importlib.util
import re
from types import SimpleNamespace

import pytest

from tests.code_blocks import ROOT, pages

PITFALLS = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PITFALLS.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| mistake"))
]


def functions_of(path):
    """Names of the test functions of a file, and of the faults that its tests plant."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_pitfall_has_a_cost_an_answer_and_a_test_that_exists(row):
    mistake, cost, answer, shown = row
    assert mistake
    assert answer
    assert re.match(r"(total|partial|yours|unknown|any)\b", cost)
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    assert named or shown == "–"
    for path, name in named:
        assert name in functions_of(path), (path, name)
        if name == "test_a_planted_fault_is_caught_by_its_detector":
            planted = re.search(rf"{name}` \(([\w, ]+)\)", shown)[1].split(", ")
            source = (ROOT / "tests" / "test_audit_faults.py").read_text(encoding="utf-8")
            assert all(f"faults.{fault}," in source for fault in planted)


def test_what_no_test_shows_is_what_the_page_says_it_leaves_to_others():
    unshown = [row for row in ROWS if row[3] == "–"]
    assert all("yours" in row[1] or row[1] == "unknown" for row in unshown)


@pytest.mark.parametrize("page", pages())
def test_files_a_page_points_to_exist(page):
    # Where a link goes within a page is checked by `make docs`.
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"(?<![\w/])docs/[\w/.]+\w", text):
        assert (ROOT / target).exists(), target


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("w_jX_j", "w<sub>j</sub>X<sub>j</sub>"),
        ("λ_{i+1}h_i/(λ_i²)", "λ<sub>i+1</sub>h<sub>i</sub>/(λ<sub>i</sub>²)"),
        ("χ²_k/k, p̃_i", "χ²<sub>k</sub>/k, p̃<sub>i</sub>"),
        ("max_{y≤λ_{i+1}}(y)", "max<sub>y≤λ<sub>i+1</sub></sub>(y)"),
        ("Σ_{i<r} 1", "Σ<sub>i&lt;r</sub> 1"),
        ("e^(ε−l_i)", "e<sup>ε−l<sub>i</sub></sup>"),
        ("R^λ, e^{ε}·2", "R<sup>λ</sup>, e<sup>ε</sup>·2"),
        ("[small_head.md](small_head.md)", "[small_head.md](small_head.md)"),
        ("`w_j` per_sample", "`w_j` per_sample"),
        ("```\nw_j\n```", "```\nw_j\n```"),
    ],
)
def test_formulas_get_their_indices(text, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="theory.md"))
    assert load_script("site_formulas").on_page_markdown(text, page) == shown


def test_links_out_of_docs_become_pages_of_the_site():
    hooks = load_script("site_links")
    text = "[a](../README.md#b) [c](../dprc/x.py) [d](theory.md)\n```\n[e](../f.md)\n```\n[g](#h)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/engine.md"))
    assert hooks.on_page_markdown("[a](../../README.md) [d](../theory.md)", page) == (
        "[a](../repository/README.md) [d](../theory.md)"
    )
    page.file.src_uri = "index.md"
    assert hooks.on_page_markdown(text, page) == (
        "[a](repository/README.md#b) [c](repository/dprc/x.py.md) [d](theory.md)\n"
        "```\n[e](../f.md)\n```\n[g](#h)"
    )
    page.file.src_uri = "repository/README.md"
    assert hooks.on_page_markdown("[a](docs/theory.md) [b](LICENSE)", page) == (
        "[a](../theory.md) [b](LICENSE.md)"
    )
