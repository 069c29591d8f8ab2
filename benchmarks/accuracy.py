"""How near the answers come to live rounds that no model has seen.

    python benchmarks/accuracy.py [--into FILE]

Qwen3-32B on B300 under vLLM 0.20.1, every pass of two live runs (TP 1 and 4) in order; see `data/NOTICE.md`.  Of each
kind of work the first 60 % of its rounds, in time order, are learned and the rest are scored.  The split is within the
kind because the runs end in decode alone; kinds share nothing in any of the models, so none sees a round that it is
scored on.  Cold starts are learned and scored as recorded.

    regression, default     what `regression(observations, role="aggregated")` gives
    regression, chosen      the best of `GRID` by MAPE on the last quarter of what is learned, then fitted on all of it
    regression, spline      the default and learned knots beside it
    table                   the embedded table as it is; its clock is another one (schedule to update)
    table, fixed ...        the table, corrected by what is learned under each policy
    ... in its own box      the same, the policy's grid spanned over the largest sizes that were learned, not over the
                            default box (512 requests, 2,000,000 KV tokens), in which these runs fill one cell of 16

Both runs drain: the first 60 % of decode is mostly at 32 requests, the rest goes down to 1.  So what is scored lies
mostly outside what was learned, and one factor for all sizes makes a table worse.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from runner import put

import fpmjax
from fpmjax import Knots, Observations, corrected, direct, evaluate, regression

DATA = Path(__file__).parent / "data"
MARK = "<!-- accuracy -->"
SIZES = (1, 4)  # tensor parallel
SHARE, INNER = 0.6, 0.75  # learned of each kind; of that, fitted while a choice is made
KINDS = {"decode": "pure decode", "mixed": "mixed", "prefill": "pure prefill"}
POLICIES = ("fixed", "dynamic_local", "hybrid")
BOXED = ("fixed", "hybrid")  # the policies that have a box
# The axes that totals can fill: the others need the length of every request, which these rounds do not carry.
AXES = (
    ("attention", "moe"),
    ("attention", "n"),
    ("attention", "moe", "n"),
    ("attention", "moe", "logN"),
    ("attention", "moe", "n", "n2"),
    ("attention", "moe", "n", "logN", "n2"),
)
GRID = [
    {"feature_axes": axes, "non_negative": sign, "max_observations": rows}
    for axes, sign, rows in product(AXES, (True, False), (64, 256))
]
HEADERS = ("work", "model", "scored", "refused", "MAPE %", "WAPE %", "bias %", "p50 %", "p90 %", "worst %")
COLUMNS = ("mape_pct", "wape_pct", "bias_pct", "p50_ape_pct", "p90_ape_pct", "worst_ape_pct")


def rounds(tp: int) -> tuple[Observations, np.ndarray]:
    """(the rounds of one run in order, the kind of work of each)."""
    seen = Observations.read(DATA / f"b300_vllm0201_fpm_rounds_qwen3_32b_tp{tp}.csv.gz")
    prefill, decode = (np.asarray(x)[:, 0] > 0 for x in (seen.work.prefill_tokens, seen.work.decode_requests))
    return seen, np.where(prefill, np.where(decode, "mixed", "prefill"), "decode")


def first_of_each(kind: np.ndarray, share: float) -> np.ndarray:
    """bool [n]: the first share of every kind."""
    first = np.zeros(len(kind), bool)
    for name in KINDS:
        rows = np.flatnonzero(kind == name)
        first[rows[: int(share * len(rows))]] = True
    return first


def score(model: Any, seen: Observations) -> dict[str, Any]:
    """The row of `evaluate` over all of them."""
    return evaluate(model, seen, by=None, blocks=1).to_pylist()[0]


def choose(seen: Observations, kind: np.ndarray) -> dict[str, dict[str, Any]]:
    """For every kind the options of the grid that do best on the last quarter of these rounds."""
    inner = first_of_each(kind, INNER)
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for options in GRID:
        model = regression(seen.where(inner), role="aggregated", **options)
        for name in KINDS:
            row = score(model, seen.where(~inner & (kind == name)))
            error = row["mape_pct"] if row["scored"] == row["n"] else np.inf
            if name not in best or error < best[name][0]:
                best[name] = error, options
    return {name: options for name, (_, options) in best.items()}


def box_of(learned: Observations) -> dict[str, Any]:
    """The largest sizes of what is learned, as the box of a correction."""
    work = learned.work
    tokens = np.asarray(work.prefill_tokens, np.int64) + np.asarray(work.decode_requests)
    kv = np.asarray(work.prefill_kv, np.int64) + np.asarray(work.decode_kv)
    sizes = {"max_batch_size": work.decode_requests, "max_num_tokens": tokens, "max_kv_tokens": kv}
    return {name: int(np.max(size)) for name, size in sizes.items()}


def in_words(options: dict[str, Any]) -> str:
    sign = "" if options["non_negative"] else ", signed"
    return f"{', '.join(options['feature_axes'])}{sign}, {options['max_observations']} rows"


def section(tp: int) -> str:
    """The table of one run, and what was chosen."""
    seen, kind = rounds(tp)
    learned = first_of_each(kind, SHARE)
    before = seen.where(learned)
    chosen = choose(before, kind[learned])
    fits = {str(options): regression(before, role="aggregated", **options) for options in chosen.values()}
    table = direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=tp))
    common = {
        "regression, default": regression(before, role="aggregated"),
        "regression, spline": regression(before, role="aggregated", spline=Knots()),
        "table": table,
        **{f"table, {policy}": corrected(table, before, policy=policy) for policy in POLICIES},
        **{f"table, {p}, in its own box": corrected(table, before, policy=p, **box_of(before)) for p in BOXED},
    }
    rows: list[tuple[str, ...]] = [HEADERS]
    for name, words in KINDS.items():
        rest = seen.where(~learned & (kind == name))
        models = {"regression, default": common["regression, default"]}
        for label, model in (models | {"regression, chosen": fits[str(chosen[name])]} | common).items():
            row = score(model, rest)
            numbers = ["-" if row[c] is None else f"{row[c]:.2f}" for c in COLUMNS]
            rows.append((words, label, str(row["scored"]), str(row["refused"] + row["unready"]), *numbers))
    return "\n\n".join(
        [
            f"**TP {tp}**, {int(learned.sum()):,} rounds learned, {int((~learned).sum()):,} scored",
            markdown(rows),
            "Chosen: " + "; ".join(f"{KINDS[name]}: {in_words(options)}" for name, options in chosen.items()) + ".",
        ]
    )


def markdown(rows: list[tuple[str, ...]]) -> str:
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [rows[0], tuple("-" * w for w in width), *rows[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors on live rounds that no model has seen")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help=f"put the tables between the lines `{MARK}` of a page"
    )
    options = parser.parse_args()
    text = "\n\n".join(section(tp) for tp in SIZES)
    print(text)
    if options.into:
        put(options.into, text, MARK)


if __name__ == "__main__":
    main()
