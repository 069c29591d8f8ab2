"""`fpmjax fit`: what engines were seen to take becomes a saved model."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from fpmjax import __version__
from fpmjax.cli import observed
from fpmjax.cli.arguments import UsageError, add_command, counts, is_artifact
from fpmjax.cli.describe import contents, in_words, learned_in_words
from fpmjax.cli.evaluate import add_groups, require_scored, score, score_lines
from fpmjax.cli.families import Family
from fpmjax.cli.observed import add_observations, in_flags, read_observations, split_at
from fpmjax.cli.output import note, print_json
from fpmjax.cli.recipe import add_recipe, starting_model
from fpmjax.cli.saved import manifest
from fpmjax.errors import CoverageError, MetricsError, ModelFileError
from fpmjax.progress import Progress

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

ABOUT = f"""\
A regression learns milliseconds from the work of each iteration, row by row.  A learned family (committee, roofline,
linear) is fitted once to everything, says beside each answer how wrong it may be and whether it lies outside of what
was observed, and refuses draft lengths far beyond that.  A correction learns factors on a measured table's answers.
Any of them then answers `fpmjax estimate MODEL` like a table.

{observed.ABOUT}"""
EXAMPLES = """\
  fpmjax fit traces/ --not-speculative --role decode -o decode.npz
  fpmjax fit 'traces/*.jsonl.gz' --not-speculative --role aggregated --first-share 0.6 -o model.npz
  fpmjax fit traces/ --not-speculative --role decode --family committee --draft-length 1:3 --plot fit.png -o learned.npz
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
    more = parser.add_argument_group("beside the model")
    more.add_argument(
        "--draft-length",
        metavar="LIST",
        type=counts,
        help="draft lengths that will be asked: a learned family names the few ordinary passes whose measurement would "
        "make them safe, and --plot shows where they fall (default: 1:4 in the plot)",
    )
    more.add_argument(
        "--plot",
        metavar="FILE",
        help="picture of the fit, .png or .svg: predicted against observed, residuals, and where draft lengths fall",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    check_plot(args)
    with in_flags():
        model = recipe = starting_model(args)
    check_draft_lengths(args, recipe)
    observations, read = read_observations(args)
    first = split_at(len(observations), args.first_share)
    if not first:
        raise UsageError(f"the first share of {len(observations):,} observations is none\nhint: raise --first-share")
    from fpmjax.store import save_model

    with in_flags():
        model = taught(recipe, observations[:first])
    save_model(model, args.output)
    lacks, anchors = {}, None
    if isinstance(recipe, Family):
        lacks = recipe.lacks(observations[:first])
        if doubt := recipe.doubt(observations[:first]):
            note(doubt)
        if "pure_decode" not in lacks:
            anchors = recommended(observations[:first], args.draft_length)
    rows = score(model, observations, first, args) if first < len(observations) else []
    on = f", continuing {args.continued}" if args.continued else ""
    note(f"{args.output}: {first:,} of {len(observations):,} observations learned{on}")
    for line in learned_in_words(model, lacks) if isinstance(recipe, Family) else in_words(model):
        note(" ".join(line.split()))
    tell_anchors(anchors)
    tell_clipped(model)
    if args.json:
        head = {"fpmjax": __version__, "model": args.output} | contents(model)
        head |= {"continued": args.continued} if args.continued else {}
        if isinstance(recipe, Family):
            head |= {"lacks": lacks, "anchors": anchors and [anchor._asdict() for anchor in anchors]}
        split = {"observations": len(observations), "learned": first, "scores": rows}
        print_json(head | {"read": read} | split)
    elif rows:
        print("\n".join(score_lines(rows)))
    if args.plot:
        from fpmjax.plot import plot_fit, write_figure

        depths = {"draft_lengths": args.draft_length} if args.draft_length else {}
        write_figure(plot_fit(model, observations, learned=first, **depths), args.plot)
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
            known = not is_artifact(name) and manifest(name)
        except ModelFileError:
            known = None
        if not known:
            raise UsageError(
                f"{name} exists and is no saved model, so it is not replaced\nhint: name another file"
            ) from None


def check_plot(args: argparse.Namespace) -> None:
    """Raise before a long fit for a picture that could not be drawn or written after it."""
    if args.plot is None:
        return
    from fpmjax.plot import check_figure_path

    check_figure_path(args.plot)
    if os.path.abspath(args.plot) == os.path.abspath(args.output):
        raise UsageError(f"{args.plot} is to be the model and the picture\nhint: name two files")


def check_draft_lengths(args: argparse.Namespace, recipe: Any) -> None:
    """Raise for draft lengths that nothing would be done with, or that are none."""
    from fpmjax.speculative import check_draft_length

    for depth in args.draft_length or ():
        check_draft_length(depth)
    if args.draft_length and not args.plot and not isinstance(recipe, Family):
        raise UsageError(
            "--draft-length belongs to a learned family or to --plot: other fits answer every draft length\n"
            "hint: ask `fpmjax estimate MODEL ... --draft-length LIST`"
        )


def recommended(observations: Observations, draft_lengths: tuple[int, ...] | None) -> Any:
    """The anchors for these draft lengths; None without any."""
    if not draft_lengths:
        return None
    from fpmjax.models.anchors import recommend_anchors

    return recommend_anchors(observations, draft_lengths=draft_lengths)


def tell_anchors(anchors: Any) -> None:
    """What to measure for the draft lengths that were given."""
    if anchors is None:
        return
    if not anchors:
        note("anchors: none needed, work near these draft lengths was observed")
        return
    note("anchors: measure these ordinary decode passes too, per rank, and fit again with everything")
    for anchor in anchors:
        note(f"anchor batch {anchor.decode_requests:,}, {anchor.decode_kv:,} KV tokens in total")


def taught(model: Any, observations: Observations) -> Any:
    """The model after these observations; a long fit is watched on a terminal, which changes nothing about it."""
    n = len(observations)
    after = model
    with Progress("learning", n, unit="observations") as bar:
        if not bar.watched or n <= CHUNK or isinstance(model, Family):
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
