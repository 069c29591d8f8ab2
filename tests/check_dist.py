"""Checks the content of a built wheel and sdist: `python tests/check_dist.py DIRECTORY`.  Not a pytest module."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

from fpmjax import __version__

ROOT = Path(__file__).parent.parent
TABLE = "fpmjax/data/fpm_forward_perf"


def files(*patterns: str) -> set[str]:
    """The files below the repository's root that match, caches aside."""
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}


# By name what must never be lost, and whatever else the package holds.
MUST_CARRY = sorted(
    {"fpmjax/__init__.py", "fpmjax/py.typed", "fpmjax/data/NOTICE.md", f"{TABLE}.parquet", f"{TABLE}.metadata.json"}
    | files("fpmjax/**/*")
)
SDIST_ONLY = [
    ".ci/run",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "tests/conftest.py",
    "benchmarks/runner.py",
    "calibration/README.md",
    "calibration/common.py",
    "notebooks/README.md",
    "notebooks/01_ten_minutes.ipynb",
    *sorted(files("calibration/**/*", "notebooks/*.py", "notebooks/*.ipynb")),
]


def check_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = f"fpmjax-{__version__}.dist-info"
        licences = [f"{info}/licenses/{name}" for name in project["license-files"]]
        wrong = missing(names, [*MUST_CARRY, *licences, f"{info}/METADATA", f"{info}/entry_points.txt"])
        foreign = {name for name in names if PurePosixPath(name).parts[0] not in ("fpmjax", info)}
        wrong += [f"does not belong into the wheel: {name}" for name in sorted(foreign)]
        if wrong:
            return wrong
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        if metadata["License-Expression"] != "Apache-2.0":
            wrong.append(f"licence expression is {metadata['License-Expression']}")
        if "fpmjax = fpmjax.cli:main" not in wheel.read(f"{info}/entry_points.txt").decode():
            wrong.append("the command `fpmjax` is not declared")
        digest = hashlib.sha256(wheel.read(f"{TABLE}.parquet")).hexdigest()
        if json.loads(wheel.read(f"{TABLE}.metadata.json"))["parquet_sha256"] != digest:
            wrong.append("the embedded table does not match the digest of its sidecar")
        return wrong + litter(names)


def check_sdist(path: Path) -> list[str]:
    """What is wrong with an sdist."""
    with tarfile.open(path) as sdist:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in sdist.getnames()}
    return missing(names, [*MUST_CARRY, *SDIST_ONLY]) + litter(names)


def missing(names: set[str], wanted: list[str]) -> list[str]:
    return [f"missing: {name}" for name in wanted if name not in names]


def litter(names: set[str]) -> list[str]:
    return [f"litter: {name}" for name in sorted(names) if "__pycache__" in name or ".venv" in name]


def main(directory: str) -> int:
    faults = 0
    for pattern, check in (("fpmjax-*.whl", check_wheel), ("fpmjax-*.tar.gz", check_sdist)):
        found = list(Path(directory).glob(pattern))
        if len(found) != 1:
            print(f"{directory} holds {len(found)} files {pattern}, not one", file=sys.stderr)
            faults += 1
            continue
        wrong = check(found[0])
        print(f"{found[0].name}: {'; '.join(wrong) or 'complete'}")
        faults += len(wrong)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
