"""A hash of code changes with what makes a result, and with nothing else."""

import json
import re

import pytest

from dprc import provenance
from dprc.results import write_result


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Give a project of a few modules in place of this one."""
    files = {
        "dprc/__init__.py": "",
        "dprc/train.py": "from dprc import engine\nimport dprc.cost\nimport json\n",
        "dprc/engine.py": "def f():\n    from dprc.sketch import g\n",
        "dprc/sketch.py": "g = 1\n",
        "dprc/cost.py": "from dprc.law import k\n",
        "dprc/law.py": "k = 1\n",
        "dprc/other.py": "",
        "dprc/tasks/__init__.py": "",
        "dprc/tasks/bbc.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    for cached in (provenance._hash, provenance._closure, provenance._imported_files):
        cached.cache_clear()


def changes(project, file, *modules, without=()):
    """Tell whether an edit of a file changes the hash of modules."""
    before = provenance.code_hash(*modules, without=without)
    path = project / file
    path.write_text(path.read_text() + "# edited\n")
    forget()
    return provenance.code_hash(*modules, without=without) != before


@pytest.mark.parametrize("file", ["train", "engine", "sketch", "cost", "law"])
def test_a_hash_changes_with_everything_that_is_imported_at_any_depth(project, file):
    assert changes(project, f"dprc/{file}.py", "dprc.train")


def test_a_hash_does_not_change_with_another_module(project):
    assert not changes(project, "dprc/other.py", "dprc.train")


def test_a_package_stands_for_all_its_modules(project):
    assert changes(project, "dprc/tasks/bbc.py", "dprc.tasks")


def test_what_only_an_excluded_module_imports_is_excluded_too(project):
    assert not changes(project, "dprc/cost.py", "dprc.train", without=["dprc.cost"])
    assert not changes(project, "dprc/law.py", "dprc.train", without=["dprc.cost"])
    assert changes(project, "dprc/engine.py", "dprc.train", without=["dprc.cost"])


def test_a_module_that_does_not_exist_is_refused_by_name(project):
    with pytest.raises(ModuleNotFoundError, match=r"dprc\.trian"):
        provenance.code_hash("dprc.trian")


@pytest.mark.parametrize("kind", provenance.SOURCES)
def test_every_kind_of_result_names_modules_that_exist(kind):
    assert re.fullmatch("[0-9a-f]{16}", provenance.result_hash(kind))


def test_training_depends_on_the_engine_and_not_on_the_accountant():
    modules, without = provenance.SOURCES["training"]
    left_out = frozenset(p for name in without for p in provenance._existing(name))
    files = {
        p.relative_to(provenance.ROOT).as_posix()
        for m in modules
        for p in provenance._closure(m, left_out)
    }
    assert {"dprc/engine.py", "dprc/sketch.py", "dprc/estimators/hutchpp.py"} <= files
    assert not [file for file in files if "accounting" in file]


def test_a_result_says_which_code_made_it(tmp_path):
    path = tmp_path / "r.json"
    write_result(path, config={}, metrics={}, privacy=None, made_by="flops")
    code = json.loads(path.read_text())["environment"]["code"]
    assert code["modules"] == ["dprc.profiling.flops"]
    assert code["hash"] == provenance.code_hash(*code["modules"], without=code["without"])
    with pytest.raises(ValueError, match=r"made_by must be one of data, .* got 'flop'"):
        write_result(path, config={}, metrics={}, privacy=None, made_by="flop")


def test_inputs_of_several_devices_and_modules_are_all_named():
    def environment(device, module):
        return {"device": device, "code": {"modules": [module], "without": [], "hash": "f" * 16}}

    text = provenance.describe(
        environment(device, module)
        for device, module in (
            ("cpu", "dprc.train"),
            ("an A100", "dprc.train"),
            ("cpu", "dprc.accounting"),
        )
    )
    code = "(code ffffffffffffffff)"
    assert text == f"Made on cpu, an A100 by dprc.train {code}, dprc.accounting {code}."
    assert "unknown code" in provenance.describe([{"device": "cpu", "code": None}])
