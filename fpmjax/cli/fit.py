"""`fpmjax fit`: what engines were seen to take becomes a saved model."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from fpmjax import __version__
from fpmjax.cli import observed
from fpmjax.cli.arguments import EMBEDDED, UsageError, add_choice, add_command, one_count
from fpmjax.cli.evaluate import add_groups, require_scored, score, score_lines
from fpmjax.cli.observed import add_observations, in_flags, read_observations, split_at
from fpmjax.cli.output import note, print_json
from fpmjax.cli.saved import contents, in_words, manifest, open_model
from fpmjax.errors import CoverageError, MetricsError, ModelFileError

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

ABOUT = f"""\
A regression learns milliseconds from the work of each iteration; a correction learns factors on a measured table's
answers.  Either one then answers `fpmjax estimate MODEL`, at any draft length, like a table.

{observed.ABOUT}"""
EXAMPLES = """\
  fpmjax fit traces/ --not-speculative --role decode -o decode.npz
  fpmjax fit 'traces/*.jsonl.gz' --not-speculative --role aggregated --first-share 0.6 -o model.npz
  fpmjax fit rounds.parquet --not-speculative --correct embedded --select tp=1 \\
      --policy hybrid --max-batch-size 32 --max-kv-tokens 150000 -o corrected.npz
"""
CHUNK = 1 << 15  # observations between two lines of progress
SIZES = ("min_observations", "max_observations")
OF_A_REGRESSION = ("role", "family", "spline", "feature_axes", "sampling_axes")
BOX = {  # what the grid of a fixed correction spans
    "max_num_tokens": "largest number of tokens in a step of this worker (default: 8192)",
    "max_batch_size": "its largest number of decode requests (default: 512)",
    "max_kv_tokens": "its largest KV total; the grid of a correction spans these three (default: 2000000)",
}
OF_A_CORRECTION = ("policy", "select", "fake_kv", *BOX)


def add(commands: Any) -> None:
    parser = add_command(commands, "fit", "a model from traces of an engine", run, about=ABOUT, examples=EXAMPLES)
    add_observations(parser)
    model = parser.add_argument_group("model")
    model.add_argument("-o", "--output", metavar="MODEL", required=True, help="file to write, by custom .npz")
    model.add_argument(
        "--min-observations", metavar="N", type=one_count, help="before a store answers or is heard (default: 5)"
    )
    model.add_argument("--max-observations", metavar="N", type=one_count, help="that a store retains (default: 64)")
    model.add_argument(
        "--bins", metavar="LIST", type=sizes, help="cells per axis over which they are spread (default: 4,4)"
    )
    fit = parser.add_argument_group("regression")
    fit.add_argument("--role", choices=("decode", "prefill", "aggregated"), help="what the worker does; required")
    fit.add_argument("--family", choices=("regression",), help="kind of fit (default: regression)")
    fit.add_argument("--spline", action="store_true", help="add learned knots where observations lie")
    fit.add_argument(
        "--feature-axes", metavar="LIST", type=names, help="1 to 6 features to fit (default: attention,moe)"
    )
    fit.add_argument(
        "--sampling-axes", metavar="LIST", type=names, help="features to retain over (default: attention,moe)"
    )
    correction = parser.add_argument_group("correction instead of a regression")
    correction.add_argument(
        "--correct", dest="table", metavar="TABLE", help=f"table, or saved model, to correct; also `{EMBEDDED}`"
    )
    correction.add_argument(
        "--policy", choices=("fixed", "dynamic_local", "hybrid"), help="where factors come from (default: fixed)"
    )
    for name, what in BOX.items():
        correction.add_argument("--" + name.replace("_", "-"), metavar="N", type=one_count, help=what)
    add_choice(correction)
    add_groups(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def sizes(text: str) -> tuple[int, ...]:
    return tuple(one_count(size.strip()) for size in text.split(","))


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    with in_flags():
        model = new_model(args)
    observations, read = read_observations(args)
    first = split_at(len(observations), args.first_share)
    if not first:
        raise UsageError(f"the first share of {len(observations):,} observations is none\nhint: raise --first-share")
    from fpmjax.store import save_model

    with in_flags():
        model = learned(model, observations[:first])
    save_model(model, args.output)
    rows = score(model, observations, first, args) if first < len(observations) else []
    note(f"{args.output}: {first:,} of {len(observations):,} observations learned")
    for line in in_words(model):
        note(" ".join(line.split()))
    if args.json:
        head = {"fpmjax": __version__, "model": args.output} | contents(model)
        split = {"observations": len(observations), "learned": first, "scores": rows}
        print_json(head | {"read": read} | split)
    elif rows:
        print("\n".join(score_lines(rows)))
    require_ready(model)
    if rows:
        require_scored(model, observations[first:], rows[0])
    return 0


def check_output(name: str) -> None:
    """Raise before a long fit for what could not be written after it, or should not be replaced."""
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"the folder {folder} does not exist\nhint: make it first")
    if os.path.exists(name):
        try:
            manifest(name)
        except ModelFileError:
            raise UsageError(
                f"{name} exists and is no saved model, so it is not replaced\nhint: name another file"
            ) from None


def new_model(args: argparse.Namespace) -> Any:
    """The model before it has seen anything."""
    absent, word = (OF_A_REGRESSION, "regression") if args.table else (OF_A_CORRECTION, "correction")
    for name in absent:
        if getattr(args, name):
            why = "it has no part in --correct" if args.table else "--correct says of what"
            raise UsageError(f"--{name.replace('_', '-')} belongs to a {word}\nhint: {why}")
    if args.table:
        from fpmjax.models.corrected import corrected

        return corrected(open_model(args), **given(args, *SIZES, *BOX, "bins", "policy"))
    if not args.role:
        raise UsageError(
            "--role is missing: decode and prefill workers learn one kind of work, aggregated ones all kinds\n"
            "hint: add --role decode, prefill or aggregated; for a correction --correct TABLE"
        )
    from fpmjax.models.regression import regression
    from fpmjax.models.settings import Knots

    options = given(args, *SIZES, "feature_axes", "sampling_axes")
    if args.bins or args.sampling_axes:
        options["bins_per_axis"] = args.bins or (4,) * len(args.sampling_axes)
    return regression(role=args.role, spline=Knots() if args.spline else None, **options)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the Python API."""
    return {name: getattr(args, name) for name in names if getattr(args, name)}


def learned(model: Any, observations: Observations) -> Any:
    """The model after these observations; counted on stderr where a person is watching a long fit."""
    n, watched = len(observations), sys.stderr is not None and sys.stderr.isatty()
    if not watched or n <= CHUNK:
        return model.update(observations)
    after = model
    try:
        for start in range(0, n, CHUNK):
            print(f"\r{start:,} of {n:,} observations", end="", file=sys.stderr, flush=True)
            after = after.update(observations[start : start + CHUNK])
    except MetricsError:
        return model.update(observations)  # names the place among all of them
    finally:
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    return after


def require_ready(model: Any) -> None:
    """Raise where the model would answer nothing, or a correction nothing of its own."""
    if hasattr(model, "factors"):
        if not model.factors.size:
            report = model.report
            raise CoverageError(
                f"no factor is in use yet: {report.get('taken', 0):,} of {report.get('observations', 0):,} "
                "observations were taken, each kind of work needs a few\n"
                "hint: the model is saved and answers as what it corrects; observe work that this answers",
                code="not_ready",
            )
    elif not model.ready:
        raise CoverageError(
            "no store is ready\nhint: the model is saved, but answers nothing; observe more and more varied work",
            code="not_ready",
        )
