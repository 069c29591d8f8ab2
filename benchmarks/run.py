"""Every benchmark and study, one after another, into the page that tells them.

    python benchmarks/run.py [--rounds N] [--into FILE] [NAME ...]    (names: the keys of `ALL`)

Each is a process of its own, so none runs on what another has compiled.  What is done stands in the page at once; a
failure leaves the section as it was, the others still run, and the exit code is 1.  A benchmark that is skipped, as
`peer` is where the peer cannot be installed, leaves its section too, and is no failure.  Needs the `bench` extra, and a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# Command -> the marks of its sections in the page; only ratios of speed are made in rounds.
TIMED = {
    "lookup": ("results",),
    "grids": ("grids",),
    "inverse": ("inverse",),
    "files": ("files",),
    "learning": ("learning",),
    "forest": ("forest",),
    "sizes": ("sizes",),
    "study": ("study",),
    "peer": ("peer",),
}
STUDIES = {"accuracy": ("lattice", "live", "drain")}
ALL = TIMED | STUDIES


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the page of benchmarks")
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"default: all of {', '.join(ALL)}")
    parser.add_argument("--rounds", type=int, help="of the speed ratios; default: what each file says")
    parser.add_argument("--into", type=Path, default=HERE / "README.md", metavar="FILE", help="default: %(default)s")
    options = parser.parse_args()
    if unknown := set(options.only) - set(ALL):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if not options.into.is_file():
        parser.error(f"no such page: {options.into}")
    names = [name for name in ALL if name in (options.only or ALL)]
    failed = []
    for i, name in enumerate(names):
        say(f"{name}, {i + 1} of {len(names)}")
        rounds = ["--rounds", str(options.rounds)] if options.rounds and name in TIMED else []
        begin, before = time.monotonic(), options.into.stat().st_mtime_ns
        done = subprocess.run([sys.executable, HERE / f"{name}.py", "--into", options.into, *rounds])
        if done.returncode:
            failed.append(name)
            end = "failed"
        else:
            end = "skipped, the page keeps its last table," if options.into.stat().st_mtime_ns == before else "done"
        say(f"{name} {end} after {time.monotonic() - begin:.0f} s")
    if failed:
        say(f"failed: {', '.join(failed)}; the page keeps what it had")
    return 1 if failed else 0


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
