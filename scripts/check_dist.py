"""Whether what was built installs and works elsewhere: ``python scripts/check_dist.py dist``.

Looks into the wheel, installs it into an environment of its own that borrows the packages of this
one but not the checkout, and uses it from another folder. Ends with an error at the first thing
that is not so.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = {"torch", "numpy", "scipy", "dp-accounting"}
# Its law is one of the tables that must come with the package.
CALIBRATE = (
    "dprc calibrate --epsilon 2 --delta 1e-5 --sample-rate 0.01 --steps 1000 --estimator hutchpp "
    "--head-rank 2 --num-probes 26 --require-certified --json"
)
IMPORT = "import dprc; print(dprc.__file__, dprc.__version__, dprc.PrivacyEngine.__name__)"


def require(true: bool, message: str) -> None:
    """End with a message unless something is true."""
    if not true:
        sys.exit(f"check_dist: {message}")


def the_only(folder: Path, pattern: str) -> Path:
    """Return the one file that matches."""
    found = sorted(folder.glob(pattern))
    require(len(found) == 1, f"{folder} must hold one {pattern}, has {[f.name for f in found]}")
    return found[0]


def check_contents(wheel: Path) -> Message:
    """Compare the files of the wheel with the package; return its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        parsed = Parser().parsestr(archive.read(metadata).decode())
    packed = {name for name in names if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dprc").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    require(packed == wanted, f"wheel and dprc/ differ in {sorted(packed ^ wanted)}")
    return parsed


def check_metadata(metadata: Message) -> str:
    """Compare the wheel's metadata with what is promised; return its version."""
    core, extras = set(), set(metadata.get_all("Provides-Extra", []))
    for line in metadata.get_all("Requires-Dist", []):
        if "extra ==" not in line:
            core.add(line.split(";")[0].split(">")[0].split("<")[0].split("=")[0].strip())
    require(core == CORE, f"the core must require {sorted(CORE)}, requires {sorted(core)}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    require(extras == set(project["optional-dependencies"]), f"extras are {sorted(extras)}")
    for field in ("Summary", "License-Expression", "License-File", "Requires-Python", "Keywords"):
        require(bool(metadata.get(field)), f"the metadata has no {field}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").strip()
    require(str(metadata.get_payload()).strip() == readme, "the long description is another README")
    return str(metadata["Version"])


def check_extras(wheel: Path, extras: list[str]) -> None:
    """Have pip resolve all extras together, with nothing but what the lock has installed here."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index"]
    pip += ["--constraint", str(ROOT / "envs" / "requirements.lock")]
    subprocess.run([*pip, f"{wheel}[{','.join(extras)}]"], check=True)


def check_use(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel away from the checkout, and use it there."""
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    # Paths in a .pth file are searched; .pth files in them, the checkout's for one, are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"

    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    where, its_version, engine = run(str(python), "-c", IMPORT).split()
    require(Path(where).is_relative_to(site), f"dprc was imported from {where}")
    require(its_version == version, f"__version__ is {its_version}, the wheel's is {version}")
    require(engine == "PrivacyEngine", f"dprc.PrivacyEngine is {engine}")
    require(run("dprc", "--version").split()[-1] == version, "dprc --version is another")
    require("calibrate" in run("dprc", "--help"), "dprc --help names no calibrate")
    answer = json.loads(run(*CALIBRATE.split()))
    require(0 < answer["epsilon_spent"] <= 2, f"dprc calibrate answered {answer}")


def main(folder: Path) -> None:
    """Check the wheel and the source distribution of a folder."""
    wheel, source = the_only(folder, "*.whl"), the_only(folder, "*.tar.gz")
    metadata = check_contents(wheel)
    version = check_metadata(metadata)
    require(source.name == f"dprc-{version}.tar.gz", f"the source distribution is {source.name}")
    check_extras(wheel, sorted(metadata.get_all("Provides-Extra", [])))
    with tempfile.TemporaryDirectory() as temporary:
        check_use(wheel, version, Path(temporary))
    print(f"check_dist: {wheel.name} works away from its checkout")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
