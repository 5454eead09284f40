"""Tasks: text, split and words around it. They know nothing of privacy but what one example is."""

from dprc.tasks.aclsum import AclsumQa, AclsumSummary
from dprc.tasks.base import Dataset, Example, Prompt, Task
from dprc.tasks.bbc import Bbc, BbcOffline
from dprc.tasks.billsum import Billsum
from dprc.tasks.files import load_dataset, save_dataset
from dprc.tasks.hotpotqa import HotpotQa
from dprc.tasks.own import OwnClassification, OwnQa, OwnSummary

_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Bbc(),
        Billsum(),
        HotpotQa(),
        BbcOffline(),
        AclsumSummary(),
        AclsumQa(),
        OwnClassification(),
        OwnSummary(),
        OwnQa(),
    )
}


def names() -> tuple[str, ...]:
    """Return the names that ``get`` knows."""
    return tuple(_TASKS)


def get(name: str) -> Task:
    """Return a task by name.

    Raises:
        ValueError: No task has this name.
    """
    if name not in _TASKS:
        raise ValueError(f"task: must be one of {', '.join(names())}, got {name!r}")
    return _TASKS[name]


__all__ = [
    "Dataset",
    "Example",
    "Prompt",
    "Task",
    "get",
    "load_dataset",
    "names",
    "save_dataset",
]
