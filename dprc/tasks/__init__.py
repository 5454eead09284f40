"""Tasks: text, split and metric. They know nothing of privacy but what one example is."""

from dprc.tasks.base import Dataset, Example, Task, load_dataset, save_dataset
from dprc.tasks.bbc import BbcOffline

_TASKS: dict[str, Task] = {task.name: task for task in (BbcOffline(),)}


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


__all__ = ["Dataset", "Example", "Task", "get", "load_dataset", "names", "save_dataset"]
