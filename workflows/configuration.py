"""The configuration of the workflow: refused with one clear line, or safe to use."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from snakemake_interface_common.exceptions import WorkflowError

# Models that need no rule to be there.
PACKAGED_MODELS = ("smollm2-135m",)
SCHEMA = Path(__file__).parent / "schemas" / "config.schema.yaml"


def check_configuration(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that is not exactly what the schema knows.

    Args:
        config: The configuration as Snakemake read it.

    Raises:
        WorkflowError: A key is unknown, missing or ill-typed, or a name is used but not defined;
            one line for each, with the path of the key.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    errors = sorted(Draft202012Validator(schema).iter_errors(config), key=lambda e: list(e.path))
    lines = [line for error in errors for line in _explain(error)]
    # Names are looked up only in a configuration whose shape is right.
    lines = lines or list(_undefined_names(config))
    if lines:
        raise WorkflowError("\n".join(f"configuration: {line}" for line in lines))


def chosen_epsilons(task: Mapping[str, Any], mode: str, method: str) -> list[float]:
    """Give the budgets at which a private method trains on a task in a mode."""
    epsilons: list[float] = task["modes"][mode].get("epsilons", task["privacy"]["epsilons"])
    only = task["privacy"].get("epsilons_of", {}).get(method, epsilons)
    return [epsilon for epsilon in epsilons if epsilon in only]


def _explain(error: ValidationError) -> Iterator[str]:
    """Say what is wrong with one key in a line, its path first."""
    path = ".".join(str(part) for part in error.absolute_path)
    where = f"{path}: " if path else ""
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        for key in error.instance:
            if key not in known:
                yield f"{where}unknown key {key!r} (known: {', '.join(known)})"
    elif error.parent is not None and error.parent.validator == "propertyNames":
        yield f"{where}{error.message}"
    elif error.validator == "enum":
        allowed = ", ".join(map(str, error.validator_value))
        yield f"{where}{error.instance!r} is unknown (known: {allowed})"
    elif error.validator == "type" and _is_number_as_text(error.instance):
        yield f"{where}{error.message} (YAML reads 1e-5 as text: write 1.0e-5)"
    else:
        yield f"{where}{error.message}"


def _is_number_as_text(value: object) -> bool:
    """Tell whether YAML gave text where a number was meant."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def _undefined_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Find names that are used but defined nowhere, and numbers that contradict each other."""
    models, methods = config["models"], config["methods"]
    for task, settings in config["tasks"].items():
        if settings["model"] not in models:
            yield f"tasks.{task}.model: unknown model {settings['model']!r} ({_known(models)})"
        yield from _idle_budgets(f"tasks.{task}", settings)
        processes = settings.get("parallel", {}).get("processes", 1)
        gpus = settings.get("resources", {}).get("gpu", 0)
        if gpus and gpus != processes:
            yield (
                f"tasks.{task}.resources.gpu: {gpus} for {processes} process(es) of "
                f"tasks.{task}.parallel; each takes one GPU"
            )
    error = config["norm_error"]
    if error["model"] not in (*PACKAGED_MODELS, *models):
        known = _known(dict.fromkeys((*PACKAGED_MODELS, *models)))
        yield f"norm_error.model: unknown model {error['model']!r} ({known})"
    if error["task"] not in config["tasks"]:
        yield f"norm_error.task: unknown task {error['task']!r} ({_known(config['tasks'])})"
    for section in ("tasks", "calibrations"):
        for name, settings in config[section].items():
            for where, method in _used_methods(f"{section}.{name}", settings):
                if method not in methods:
                    yield f"{where}: unknown method {method!r} ({_known(methods)})"
                elif section == "calibrations" and methods[method] is None:
                    yield f"{where}: method {method!r} is not private and has no noise"
    for name in config["calibrations"]:
        if name in config["tasks"]:
            yield f"calibrations.{name}: a task has the same name"
    for name, method in methods.items():
        yield from _incomplete_method(f"methods.{name}", method)


def _idle_budgets(where: str, task: Mapping[str, Any]) -> Iterator[str]:
    """Find budgets of single methods that lead to no run."""
    for method, epsilons in task["privacy"].get("epsilons_of", {}).items():
        path = f"{where}.privacy.epsilons_of.{method}"
        if method not in task["methods"]:
            yield f"{path}: the task has no such method ({_known(dict.fromkeys(task['methods']))})"
        for epsilon in epsilons:
            if epsilon not in task["privacy"]["epsilons"]:
                yield f"{path}: {epsilon:g} is none of {where}.privacy.epsilons"


def _used_methods(where: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each method a section uses, after the key that names it."""
    yield from ((f"{where}.methods", method) for method in settings["methods"])
    for mode, changes in settings.get("modes", {}).items():
        yield from ((f"{where}.modes.{mode}.methods", m) for m in changes.get("methods", ()))


def _incomplete_method(where: str, method: Mapping[str, Any] | None) -> Iterator[str]:
    """Find options that an estimator needs, or cannot have."""
    if method is None:
        return
    randomized = method["estimator"] in ("hutchinson", "hutchpp")
    if method.get("analysis") == "envelope" and method.get("sketch") == "per_sample":
        yield f"{where}: analysis 'envelope' needs sketch 'shared'"
    for key in ("num_probes", "sketch", "analysis"):
        if randomized and key not in method:
            yield f"{where}: estimator {method['estimator']!r} needs {key!r}"
        if not randomized and key in method:
            yield f"{where}: estimator {method['estimator']!r} has no {key!r}"


def _known(names: Mapping[str, Any]) -> str:
    return f"known: {', '.join(names)}"
