"""The locks pin everything, and the conda environments say the same as the locks."""

import importlib.metadata
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.workflow.conftest import ROOT

ENVIRONMENTS = ("accounting", "figures", "training")


def read_pins(lines):
    """Read `name==version` lines into a mapping; anything else is refused."""
    pins = {}
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        pins[canonicalize_name(requirement.name)] = specifier.version
    return pins


def read_lock(name):
    lines = (ROOT / "envs" / name).read_text().splitlines()
    return read_pins(line for line in lines if line.strip() and not line.startswith("#"))


def read_environment(name):
    loaded = yaml.safe_load((ROOT / "envs" / f"{name}.yaml").read_text())
    (pip,) = [entry["pip"] for entry in loaded["dependencies"] if isinstance(entry, dict)]
    return read_pins(pip)


def project_requirements():
    """List what pyproject.toml asks for, extras and build system included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    requirements = [Requirement(line) for line in [*lines, *(r for extra in extras for r in extra)]]
    return [r for r in requirements if canonicalize_name(r.name) != "dprc"]


def missing_dependencies(pins):
    """List what pinned packages ask for here and the pins do not have."""
    missing = []
    for name in pins:
        for line in importlib.metadata.distribution(name).requires or []:
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and canonicalize_name(requirement.name) not in pins:
                missing.append(f"{name} needs {requirement.name}")
    return missing


def test_lock_pins_this_torch():
    assert read_lock("requirements.lock")["torch"] == "2.13.0"


def test_lock_satisfies_every_requirement_of_the_project():
    pins = read_lock("requirements.lock")
    for requirement in project_requirements():
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, requirement
        assert requirement.specifier.contains(Version(version)), requirement


def test_lock_is_closed_under_dependencies():
    assert missing_dependencies(read_lock("requirements.lock")) == []


def test_this_environment_is_the_locked_one():
    pins = {**read_lock("requirements.lock"), **read_lock("requirements-data.lock")}
    installed = {name: Version(importlib.metadata.version(name)).public for name in pins}
    assert installed == pins


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_conda_pins_are_those_of_the_lock(name):
    pins, lock = read_environment(name), read_lock("requirements.lock")
    assert {package: lock.get(package) for package in pins} == pins
    assert missing_dependencies(pins) == []


def test_training_environment_installs_the_data_lock_without_dependencies():
    script = (ROOT / "envs" / "training.post-deploy.sh").read_text()
    assert "pip install --no-deps -r envs/requirements-data.lock" in script


def test_only_rules_without_torch_use_an_environment_without_torch():
    assert "torch" in read_environment("training")
    assert "torch" not in read_environment("accounting")
    assert "torch" not in read_environment("figures")
