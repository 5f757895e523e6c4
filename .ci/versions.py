"""The wheel on every Python that penstock supports, in environments of its own.

    python .ci/versions.py test     # the tests that need no torch; on 3.10 also with the lowest
                                    # version of each dependency, and those of torch 2.0.1
    python .ci/versions.py smoke    # install, convert a sample, doctor: a minute in all
    python .ci/versions.py release  # build twice, compare, twine check; then, on every Python, an
                                    # empty environment with the wheel runs the README
    python .ci/versions.py find 3.12    # where an interpreter is

Pythons are looked for as python3.X on PATH and among pyenv's; PENSTOCK_PYTHONS names more, as
paths with ":" between them. One line tells what became of each. Environments stay in
.venv-versions, so that a second run has little to install.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venv-versions"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
NO_TORCH = (
    "core",
    "ui",
    "bags",
    "media",
    "dataset",
    "conversion",
    "test_samples.py",
    "test_cli.py",
)
# What people with Isaac Sim have; tensordict 0.9 is the last that this torch can import.
OLD_TORCH = ("torch==2.0.1", "numpy==1.26.4", "tensordict==0.9.1")
OLD_TORCH_TESTS = (
    "checkpoints",
    "rollouts",
    "replay/test_images.py",
    "ui/test_monitor.py",
    "test_versions.py",
)
SHOWN = ("numpy", "av", "pyarrow", "rosbags", "torch")
SAMPLE = """
from penstock.samples import write_sample
write_sample("take.bag", seconds=2, cameras=1, width=64, height=48)
"""


class Failed(Exception):
    """A command that failed; its output is the message."""


@dataclass
class Outcome:
    """What became of one environment."""

    name: str
    text: str
    good: bool = True


def find_python(version: str) -> Path | None:
    """Find an interpreter of a version that runs and can make environments."""
    for candidate in _candidates(version):
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return Path(candidate)
    return None


def _candidates(version: str) -> Iterator[str]:
    yield from filter(None, os.environ.get("PENSTOCK_PYTHONS", "").split(os.pathsep))
    if found := shutil.which(f"python{version}"):
        yield found
    root = os.environ.get("PYENV_ROOT")
    if root is None and shutil.which("pyenv"):
        done = subprocess.run(["pyenv", "root"], capture_output=True, text=True)
        root = done.stdout.strip() or None
    if root is not None:
        for folder in sorted(Path(root, "versions").glob(f"{version}.*"), reverse=True):
            yield str(folder / "bin" / "python")


def run(*words: object, cwd: Path = ROOT, log: Path | None = None) -> str:
    """Run a command; return what it says, or raise with the end of it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if log is not None:
        log.write_text(done.stdout)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words))}\n{done.stdout[-6000:]}")
    return done.stdout


def build_wheel() -> Path:
    """Build the wheel and return it."""
    folder = HOME / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel


def build_release() -> Path:
    """Build sdist and wheel twice, compare their bytes, check them, and return the wheel."""
    when = run("git", "log", "-1", "--format=%ct").strip()
    os.environ |= {"SOURCE_DATE_EPOCH": when}
    os.environ.setdefault("PENSTOCK_URL", "https://example.org/penstock")
    built = []
    for number in (1, 2):
        folder = HOME / f"dist{number}"
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
        built.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    if built[0] != built[1]:
        raise Failed(f"two builds differ: {', '.join(built[0])}")
    run(sys.executable, "-m", "twine", "check", "--strict", *(HOME / "dist1").iterdir())
    print(f"{', '.join(built[0])}: the same bytes twice, twine finds nothing", flush=True)
    (wheel,) = (HOME / "dist1").glob("penstock-*.whl")
    return wheel


def make_environment(python: Path, folder: Path, *packages: object) -> Path:
    """Make an environment, or bring one up to date; return its interpreter."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        run(python, "-m", "venv", folder)
    pip = (inside, "-m", "pip", "install", "--disable-pip-version-check")
    run(*pip, *packages)
    wheels = [word for word in packages if ".whl" in str(word)]
    run(*pip, "--force-reinstall", "--no-deps", *wheels)  # the version is the same, the code is not
    return inside


def run_tests(inside: Path, name: str, tests: tuple[str, ...]) -> str:
    """Run tests against the installed wheel; return pytest's last line, and the versions."""
    paths = [ROOT / "tests" / test for test in tests]
    said = run(
        *(inside, "-m", "pytest", "-m", "not stress and not peers and not cluster", "-n", "2"),
        *("--dist", "worksteal", "-rs", *paths),
        log=HOME / f"{name}.log",
    )
    return f"{said.strip().splitlines()[-1].strip('= ')} ({shown_versions(inside)})"


def shown_versions(inside: Path) -> str:
    """Return the versions of the packages that matter most."""
    listed = run(inside, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check")
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", listed, re.MULTILINE))
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)


def lowest(wheel: Path) -> list[str]:
    """Return the lower bound of every dependency as the version to install."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = file.read(name).decode()
    needed = re.findall(r"^Requires-Dist: ([\w.-]+)>=([\w.]+)(.*)$", metadata, re.MULTILINE)
    return [f"{name}=={version}" for name, version, rest in needed if "extra ==" not in rest]


def test(version: str, python: Path, wheel: Path) -> Iterator[Outcome]:
    """Run the tests that need no torch; on the oldest Python with the lowest versions, too."""
    wanted = f"{wheel}[test]"
    jobs = [(version, NO_TORCH, [wanted])]
    if version == VERSIONS[0]:
        jobs.append((f"{version}-lowest", NO_TORCH, [wanted, *lowest(wheel)]))
        jobs.append((f"{version}-torch", OLD_TORCH_TESTS, [wanted, *OLD_TORCH]))
    for name, tests, packages in jobs:
        try:
            inside = make_environment(python, HOME / name, *packages)
            yield Outcome(name, f"passed: {run_tests(inside, name, tests)}")
        except Failed as error:
            yield Outcome(name, f"FAILED: {error}", good=False)


def smoke(version: str, python: Path, wheel: Path) -> Iterator[Outcome]:
    """Install the wheel afresh, convert a sample, and let the doctor look at the dataset."""
    with tempfile.TemporaryDirectory(prefix="penstock-smoke-") as name:
        folder = Path(name)
        try:
            run(python, "-m", "venv", folder / "venv")
            inside = folder / "venv" / "bin" / "python"
            penstock = folder / "venv" / "bin" / "penstock"
            run(inside, "-m", "pip", "install", "--disable-pip-version-check", wheel)
            said = run(penstock, "--version", cwd=folder).strip()
            run(penstock, "--help", cwd=folder)
            run(inside, "-c", SAMPLE, cwd=folder)
            run(penstock, "convert", "take.bag", "dataset", cwd=folder)
            run(penstock, "doctor", "dataset", cwd=folder)
            yield Outcome(
                version, f"{said}: installed, converted, checked ({shown_versions(inside)})"
            )
        except Failed as error:
            yield Outcome(version, f"FAILED: {error}", good=False)


def release(version: str, python: Path, wheel: Path) -> Iterator[Outcome]:
    """Install the wheel with its extras into an empty environment, and run the README there."""
    folder = HOME / f"{version}-release"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(python, "-m", "venv", folder)
        inside = folder / "bin" / "python"
        pip = (inside, "-m", "pip", "install", "--disable-pip-version-check")
        run(*pip, "-c", ROOT / "constraints.txt", "torch")
        run(*pip, f"{wheel}[rl,onnx,test]")
        with tempfile.TemporaryDirectory(prefix="penstock-release-") as name:
            home = Path(name)
            (home / "tests").mkdir()
            shutil.copy(ROOT / "tests" / "test_readme.py", home / "tests")
            for needed in ("README.md", "README.zh-CN.md", "Makefile"):
                shutil.copy(ROOT / needed, home)
            said = run(inside, "-m", "pytest", "-q", "--timeout", "600", "tests", cwd=home)
        text = f"{said.strip().splitlines()[-1].strip('= ')} ({shown_versions(inside)})"
        yield Outcome(version, f"the README runs: {text}")
    except Failed as error:
        yield Outcome(version, f"FAILED: {error}", good=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Go through the versions; 1 if anything failed, or no Python was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["test", "smoke", "release", "find"])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="such as 3.10; all if none")
    words = parser.parse_args()
    if words.what == "find":
        found = find_python(words.versions[0])
        print(found or f"python{words.versions[0]}")
        return found is None
    HOME.mkdir(exist_ok=True)
    wheel = build_release() if words.what == "release" else build_wheel()
    kinds = {"test": (test, "tested"), "smoke": (smoke, "smoked"), "release": (release, "tried")}
    each, done = kinds[words.what]
    outcomes: list[Outcome] = []
    for version in words.versions:
        python = find_python(version)
        if python is None:
            print(f"{version}: not found, not {done}", flush=True)
            continue
        begin = time.monotonic()
        for outcome in each(version, python, wheel):
            seconds, begin = time.monotonic() - begin, time.monotonic()
            print(f"{outcome.name}: {outcome.text} [{seconds:.0f} s]", flush=True)
            outcomes.append(outcome)
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
