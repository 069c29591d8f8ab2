"""How near the answers come to measurements that no model has seen.

    python benchmarks/accuracy.py [--into FILE] [lattice | live | drain] ...

`lattice`: few points of four measured lattices, asked about the others and about wider batches (`accuracy_lattice.py`);
`live` and `drain`: two live runs in the order of time (`accuracy_live.py`).  Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import accuracy_lattice
import accuracy_live
from runner import put, versions

STUDIES = {"lattice": accuracy_lattice.section, "live": accuracy_live.live, "drain": accuracy_live.drain}


def mark(name: str) -> str:
    """The line of a page between two of which the tables of a study stand."""
    return f"<!-- {name} -->"


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors on measurements that no model has seen")
    parser.add_argument("only", nargs="*", metavar="STUDY", help=f"default: all of {', '.join(STUDIES)}")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the tables between the marks of a page")
    options = parser.parse_args()
    if unknown := set(options.only) - set(STUDIES):
        parser.error(f"no such study: {', '.join(sorted(unknown))}")
    for name in options.only or STUDIES:
        text = f"{STUDIES[name]()}\n\n{versions()}"
        print(text, end="\n\n", flush=True)
        if options.into:
            put(options.into, text, mark(name))


if __name__ == "__main__":
    main()
