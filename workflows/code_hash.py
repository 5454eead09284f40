"""A hash of the modules a command uses: an edit reruns the rules it can change, and no others."""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dprc", "paper_figures")


def code_hash(*modules: str) -> str:
    """Hash the source of modules and of everything of this project they import.

    Args:
        modules: Dotted names, e.g. ``"dprc.train"``. A package stands for all its modules, because
            registries load them by name.

    Returns:
        Sixteen hexadecimal digits that change when any of those sources changes.
    """
    files = sorted({path for module in modules for path in _closure(module)})
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _closure(module: str) -> frozenset[Path]:
    """Find the files of a module and of all it imports, at any depth."""
    found: set[Path] = set()
    pending = list(_files(module))
    if not pending:
        raise ModuleNotFoundError(f"code_hash: no module {module!r} in {ROOT}")
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported_files(path)
    return frozenset(found)


def _files(module: str) -> Iterator[Path]:
    """Yield the file of a module, or all files of a package."""
    base = ROOT.joinpath(*module.split("."))
    if base.with_suffix(".py").is_file():
        yield base.with_suffix(".py")
    elif (base / "__init__.py").is_file():
        yield from base.rglob("*.py")


@cache
def _imported_files(path: Path) -> frozenset[Path]:
    """Find the files of this project that one file names in its import statements."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from dprc import results` names a module; `from dprc.results import f` a function.
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        for name in names:
            # The root packages are lazy: they load nothing until a name of theirs is used.
            if name.split(".")[0] in PACKAGES and name not in PACKAGES:
                found |= {file for file in _module_file(name) if file.is_file()}
    return frozenset(found)


def _module_file(name: str) -> tuple[Path, Path]:
    """Give the two places where a module of that name can be."""
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py"), base / "__init__.py"
