"""`fpmjax fit`: what engines were seen to take becomes a saved model."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from fpmjax import __version__
from fpmjax.cli import observed
from fpmjax.cli.arguments import UsageError, add_command
from fpmjax.cli.evaluate import add_groups, require_scored, score, score_lines
from fpmjax.cli.observed import add_observations, in_flags, read_observations, split_at
from fpmjax.cli.output import note, print_json
from fpmjax.cli.recipe import add_recipe, starting_model
from fpmjax.cli.saved import contents, in_words, manifest
from fpmjax.errors import CoverageError, MetricsError, ModelFileError
from fpmjax.progress import Progress

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

ABOUT = f"""\
A regression learns milliseconds from the work of each iteration; a correction learns factors on a measured table's
answers.  Either one then answers `fpmjax estimate MODEL`, at any draft length, like a table.

{observed.ABOUT}"""
EXAMPLES = """\
  fpmjax fit traces/ --not-speculative --role decode -o decode.npz
  fpmjax fit 'traces/*.jsonl.gz' --not-speculative --role aggregated --first-share 0.6 -o model.npz
  fpmjax fit today/ --not-speculative --continue decode.npz -o decode.npz
  fpmjax fit rounds.parquet --not-speculative --correct embedded --select tp=1 \\
      --policy hybrid --max-batch-size 32 --max-kv-tokens 150000 -o corrected.npz
"""
CHUNK = 1 << 15  # observations between two looks at a long fit


def add(commands: Any) -> None:
    parser = add_command(commands, "fit", "a model from traces of an engine", run, about=ABOUT, examples=EXAMPLES)
    add_observations(parser)
    add_recipe(parser)
    add_groups(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    with in_flags():
        model = starting_model(args)
    observations, read = read_observations(args)
    first = split_at(len(observations), args.first_share)
    if not first:
        raise UsageError(f"the first share of {len(observations):,} observations is none\nhint: raise --first-share")
    from fpmjax.store import save_model

    with in_flags():
        model = learned(model, observations[:first])
    save_model(model, args.output)
    rows = score(model, observations, first, args) if first < len(observations) else []
    on = f", continuing {args.continued}" if args.continued else ""
    note(f"{args.output}: {first:,} of {len(observations):,} observations learned{on}")
    for line in in_words(model):
        note(" ".join(line.split()))
    tell_clipped(model)
    if args.json:
        head = {"fpmjax": __version__, "model": args.output} | contents(model)
        head |= {"continued": args.continued} if args.continued else {}
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


def learned(model: Any, observations: Observations) -> Any:
    """The model after these observations; a long fit is watched on a terminal, which changes nothing about it."""
    n = len(observations)
    after = model
    with Progress("learning", n, unit="observations") as bar:
        if not bar.watched or n <= CHUNK:
            return model.update(observations)
        try:
            for start in range(0, n, CHUNK):
                bar(start)
                after = after.update(observations[start : start + CHUNK])
        except MetricsError:
            return model.update(observations)  # names the place among all of them
    return after


def tell_clipped(model: Any) -> None:
    """Note factors at the bounds of a correction: the engine is farther from what is corrected than they say."""
    factors = getattr(model, "factors", None)
    if factors is not None and (clipped := int(((factors == model.bounds[0]) | (factors == model.bounds[1])).sum())):
        low, high = model.bounds
        note(
            f"{clipped:,} of {len(factors):,} factors are cut to the bounds {low:g} and {high:g}: the engine is "
            "farther away than that; correct a nearer table, or widen --factor-bounds"
        )


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
