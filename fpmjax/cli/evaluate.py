"""`fpmjax evaluate`: how far a model's answers lie from what an engine was seen to take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fpmjax import __version__
from fpmjax.cli import observed
from fpmjax.cli.arguments import UsageError, add_command, one_count
from fpmjax.cli.describe import level_in_words
from fpmjax.cli.observed import add_observations, in_flags, read_observations, split_at
from fpmjax.cli.output import aligned, breakdown, print_json
from fpmjax.cli.saved import about, add_model, open_model

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

GROUPS = ("kind", "batch", "kv", "tokens", "support", "none")
USUAL: tuple[str, ...] = ("kind", "batch")
ABOUT = f"""\
{observed.ABOUT}
Errors are 100 (predicted - observed) / observed: MAPE is the mean of their sizes, bias their mean, WAPE the summed
misses over the summed times; p50, p90 and worst are of their sizes.  An answer of a model that has not seen enough of
such work is unready, every other missing answer is refused; neither is scored.

Of a model that states a range beside each answer, `in 90 %` is the share of scored times inside the 90 % range, and
`outside` how many of them lie outside of what the model was fitted on; --by support splits the scores by how far, in
e-folds.
"""
EXAMPLES = """\
  fpmjax evaluate model.npz later.jsonl.gz --not-speculative
  fpmjax evaluate model.npz rounds.csv --not-speculative --first-share 0.6 --by kind,batch --json
  fpmjax evaluate embedded --select tp=1 'traces/*.jsonl' --not-speculative
"""
NUMBERS = ("mape_pct", "wape_pct", "bias_pct", "p50_ape_pct", "p90_ape_pct", "worst_ape_pct")
HEADERS = ("MAPE %", "WAPE %", "bias %", "p50 %", "p90 %", "worst %")


def add(commands: Any) -> None:
    parser = add_command(
        commands, "evaluate", "how far a model is from what was observed", run, about=ABOUT, examples=EXAMPLES
    )
    add_model(parser)
    add_observations(parser)
    add_groups(parser)


def add_groups(parser: argparse.ArgumentParser) -> None:
    """--by and --blocks."""
    scores = parser.add_argument_group("scores")
    scores.add_argument(
        "--by",
        metavar="LIST",
        type=groups,
        help=f"how the scores are split: {', '.join(GROUPS)}; the sizes in classes up to each power of two "
        "(default: kind,batch, and support where the model states it)",
    )
    scores.add_argument(
        "--blocks", metavar="N", type=one_count, default=1, help="also in N blocks of their order (default: 1)"
    )


def groups(text: str) -> tuple[str, ...]:
    """Comma-separated names out of `GROUPS`; an argparse type."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GROUPS)}")
    return names


def run(args: argparse.Namespace) -> int:
    model = open_model(args)
    observations, read = read_observations(args)
    first = 0 if args.first_share is None else split_at(len(observations), args.first_share)
    if first == len(observations):
        raise UsageError(f"nothing is left to score behind the first {first:,}\nhint: give a smaller --first-share")
    rows = score(model, observations, first, args)
    if args.json:
        head = {"fpmjax": __version__} | about(args, model)
        print_json(head | {"read": read, "observations": len(observations), "first": first, "scores": rows})
    else:
        print("\n".join(score_lines(rows)))
    require_scored(model, observations[first:], rows[0])
    return 0


def score(model: Any, observations: Observations, first: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of `fpmjax.evaluate` behind the first ones, the total once; rows count from the first observation."""
    from fpmjax.evaluate import ALL, evaluate

    rows: list[dict[str, Any]] = []
    by_all = list(args.by or USUAL)
    for by in by_all:
        table = evaluate(model, observations[first:], by=None if by == "none" else by, blocks=args.blocks)
        for row in table.to_pylist():
            total = row["group"] == ALL
            if total and rows and by != by_all[0]:
                continue
            row["by"] = None if total else by
            for name in ("first", "last", "worst_row"):
                row[name] = None if row[name] is None else row[name] + first
            rows.append(row)
        if args.by is None and by == USUAL[-1] and rows[0]["extrapolated"] is not None:
            by_all.append("support")
    return rows


def score_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The scores for people."""
    blocks = any(row["block"] is not None for row in rows)
    level = next((row["interval_level"] for row in rows if row["interval_level"] is not None), None)
    placed = any(row["extrapolated"] is not None for row in rows)
    stated = [*([] if level is None else [f"in {level_in_words(level)}"]), *(["outside"] if placed else [])]
    headers = ["by", "group", *(["block"] if blocks else []), "n", *HEADERS, *stated, "refused", "unready"]
    cells = [
        [
            row["by"] or "",
            row["group"],
            *(["" if row["block"] is None else str(row["block"])] if blocks else []),
            f"{row['n']:,}",
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in NUMBERS),
            *([] if level is None else [share_in_words(row["interval_coverage"])]),
            *(["-" if row["extrapolated"] is None else f"{row['extrapolated']:,}"] if placed else []),
            f"{row['refused']:,}",
            f"{row['unready']:,}",
        ]
        for row in rows
    ]
    return aligned(headers, cells, left=(0, 1))


def share_in_words(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f} %"


def require_scored(model: Any, observations: Observations, total: dict[str, Any]) -> None:
    """Raise what the first refusal is about where nothing has an answer."""
    if total["scored"]:
        return
    from fpmjax.errors import CoverageError
    from fpmjax.estimate import estimate

    reasons = {name: total[name] for name in ("refused", "unready") if total[name]}
    told = f"none of the {total['n']:,} iterations has an answer ({breakdown(reasons)})"
    try:
        with in_flags():
            estimate(model, observations.work)
    except CoverageError as error:
        raise CoverageError(f"{told}: {error}", code=error.code) from None
    raise CoverageError(told)
