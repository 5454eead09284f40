"""Which code makes which result: an edit makes out of date what it can change, and nothing else."""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dprc", "paper_figures")
_THIS_FILE = Path(__file__).resolve()


class Sources(NamedTuple):
    """Modules that make a kind of result, and modules they import that cannot change it."""

    modules: tuple[str, ...]
    without: tuple[str, ...] = ()


# The noise multiplier of a run is among its settings, and norms do not depend on what they cost in
# privacy: neither changes with the accountant.
_ACCOUNTING = "dprc.accounting"
SOURCES: Mapping[str, Sources] = MappingProxyType(
    {
        "data": Sources(("dprc.tasks",)),
        "model": Sources(("dprc.models",)),
        "calibration": Sources((_ACCOUNTING,)),
        "envelope": Sources(("dprc.accounting.envelope",)),
        "training": Sources(("dprc.train",), without=(_ACCOUNTING,)),
        "flops": Sources(("dprc.profiling.flops",), without=(_ACCOUNTING,)),
        "layer_memory": Sources(("dprc.profiling.layer_memory",), without=(_ACCOUNTING,)),
        "step_memory": Sources(("dprc.profiling.memory",), without=(_ACCOUNTING,)),
        "layer_profile": Sources(("dprc.profiling.latency",), without=(_ACCOUNTING,)),
        "peers": Sources(("dprc.profiling.peers",), without=(_ACCOUNTING,)),
        "audit": Sources(("dprc.audit",)),
        "norm_error": Sources(("dprc.profiling.norm_error", "dprc.models"), without=(_ACCOUNTING,)),
    }
)


def sources(kind: str) -> Sources:
    """Look up which modules make a kind of result.

    Raises:
        ValueError: The kind is unknown.
    """
    if kind not in SOURCES:
        raise ValueError(f"made_by must be one of {', '.join(SOURCES)}, got {kind!r}")
    return SOURCES[kind]


def result_hash(kind: str) -> str:
    """Hash the code that makes a kind of result, e.g. ``"training"``.

    Raises:
        ValueError: The kind is unknown.
    """
    modules, without = sources(kind)
    return code_hash(*modules, without=without)


def code_record(kind: str) -> dict[str, Any]:
    """Describe the code that makes a kind of result, as a value that JSON can hold.

    Returns:
        ``modules``, ``without`` and ``hash``.

    Raises:
        ValueError: The kind is unknown.
    """
    modules, without = sources(kind)
    return {"modules": list(modules), "without": list(without), "hash": result_hash(kind)}


def describe(environments: Iterable[Mapping[str, Any]]) -> str:
    """Say on which devices and by which code results were made, in a line for a caption.

    Args:
        environments: Of result files.

    Example:
        >>> code = {"modules": ["dprc.train"], "without": [], "hash": "0123456789abcdef"}
        >>> describe([{"device": "cpu", "code": code}])
        'Made on cpu by dprc.train (code 0123456789abcdef).'
    """
    # Dictionaries, as sets that keep their order.
    devices: dict[str, None] = {}
    codes: dict[str, None] = {}
    for environment in environments:
        devices[str(environment.get("device") or "an unnamed device")] = None
        code = environment.get("code")
        name = f"{', '.join(code['modules'])} (code {code['hash']})" if code else "unknown code"
        codes[name] = None
    return f"Made on {', '.join(devices)} by {', '.join(codes)}." if devices else ""


def code_hash(*modules: str, without: Sequence[str] = ()) -> str:
    """Hash the source of modules and of everything of this project they import.

    Args:
        modules: Dotted names, e.g. ``"dprc.train"``. A package stands for all its modules, because
            registries load them by name.
        without: Modules and packages that are left out, with what only they import.

    Returns:
        Sixteen hexadecimal digits that change when any of those sources changes.

    Raises:
        ModuleNotFoundError: There is no such module.
    """
    return _hash(modules, tuple(without))


@cache
def _hash(modules: tuple[str, ...], without: tuple[str, ...]) -> str:
    left_out = frozenset(path for module in without for path in _existing(module))
    digest = hashlib.sha256()
    for path in sorted({path for module in modules for path in _closure(module, left_out)}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _closure(module: str, left_out: frozenset[Path]) -> frozenset[Path]:
    """Find the files of a module and of all it imports, at any depth."""
    found: set[Path] = set()
    pending = list(_existing(module))
    while pending:
        path = pending.pop()
        # What this file says about code changes no result.
        if path not in found and path not in left_out and path != _THIS_FILE:
            found.add(path)
            pending += _imported_files(path)
    return frozenset(found)


def _existing(module: str) -> list[Path]:
    """List the files of a module, of which there must be one."""
    files = list(_files(module))
    if not files:
        raise ModuleNotFoundError(f"code_hash: no module {module!r} in {ROOT}")
    return files


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
