"""The command `fpmjax`: data on stdout, everything else on stderr, no traceback for a user's mistake.

Each subcommand is one module with `add(commands)`, which describes its arguments, and `run(args)`, which returns
the exit code.  Whatever imports jax is imported inside `run`, so that help and inspection stay quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fpmjax import __version__
from fpmjax.cli import build, calibrate, compare, coverage, demo, estimate, evaluate, fit, inspect, selfcheck, sweep
from fpmjax.cli.arguments import BAD_INPUT, NOT_COVERED, Parser
from fpmjax.cli.output import abandon, tell
from fpmjax.errors import CoverageError, FpmError

INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports a process that SIGINT or SIGPIPE ended

DESCRIPTION = """\
How long does one forward pass of an LLM inference engine take?  Answers come from tables of measured engine
steps; a question that no measurement supports is refused, never guessed.

TABLE is a Parquet file with its .metadata.json beside it, a folder that holds such a pair, or the word
`embedded` for the table inside this package (write ./embedded for a folder of that name).  MODEL is a TABLE, a
file that `fpmjax fit` made of an engine's traces, or a learned artifact of aisimulate (JSON).
"""
EPILOG = """\
exit codes: 0 answered, at least in part; 1 selfcheck found a different bit; 2 bad input; 3 nothing answered, for want
of measurements; 130 interrupted; 141 the reader of the output went away

examples:
  fpmjax demo
  fpmjax estimate embedded --select tp=1 --batch 1,4,8 --kv-per-request 4096 --draft-length 1:4
  fpmjax calibrate --template study.csv
  fpmjax COMMAND --help

in the repository: notebooks/ (five questions, ten minutes each) and calibration/ (how far answers can be trusted)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    if sys.stderr is None:  # `2>&-`: print() takes None for stdout, and the next file to be opened becomes stderr
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:  # `>&-`
        tell("error: stdout is closed\nhint: redirect it to a file, or to /dev/null where nobody reads it")
        return BAD_INPUT
    if hasattr(sys.stdout, "reconfigure"):  # a model's or a file's name may not fit the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = answer(argv)
        sys.stdout.flush()  # what cannot be written is found out here at the latest
        return code
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        abandon(sys.stdout)
        return BROKEN_PIPE
    except OSError as error:
        tell(f"error: {error.filename or 'output'}: {error.strerror or error}")
        abandon(sys.stdout)
        return BAD_INPUT


def answer(argv: Sequence[str] | None) -> int:
    """The exit code of one command, its mistakes told."""
    try:
        args = parser().parse_args(argv)
        return args.run(args)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except FpmError as error:
        tell(f"error: {error}")
        return NOT_COVERED if isinstance(error, CoverageError) else BAD_INPUT
    except MemoryError:
        tell("error: out of memory\nhint: ask in smaller pieces")
        return BAD_INPUT


def parser() -> Parser:
    """The whole command line, described."""
    top = Parser(prog="fpmjax", description=DESCRIPTION, epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"fpmjax {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, inspect, estimate, sweep, compare, coverage, build, fit, evaluate, calibrate, selfcheck):
        command.add(commands)
    return top
