"""How near the answers come to live rounds that no model has seen.

Qwen3-32B on B300 under vLLM 0.20.1, every pass of two live runs (TP 1 and 4) in order; see `data/NOTICE.md`.  Of each
kind of work the first 60 % of its rounds, in time order, are learned and the rest are scored.  The split is within the
kind because the runs end in decode alone; kinds share nothing in any of the models, so none sees a round that it is
scored on.  Cold starts are learned and scored as recorded.

    committee, hardware     `learned(observations, role="aggregated", hardware=Hardware(...))`
    committee               the same without what the datasheet says
    linear fit              nonnegative least squares of relative errors, per kind of work, on what `all_totals` names
    regression, default     what `regression(observations, role="aggregated")` gives
    regression, chosen      the best of `GRID` by MAPE on the last quarter of what is learned, then fitted on all of it
    regression, spline      the default and learned knots beside it
    table                   the embedded table as it is; its clock is another one (schedule to update)
    table, fixed ...        the table, corrected by what is learned under each policy
    ... in its own box      the same, the policy's grid spanned over the largest sizes that were learned, not over the
                            default box (512 requests, 2,000,000 KV tokens), in which these runs fill one cell of 16

Both runs drain: the first 60 % of decode is mostly at 32 requests, the rest goes down to 1.  So what is scored lies
mostly outside what was learned, and one factor for all sizes makes a table worse.

`drain` asks for more: decode without the sweep that the runs begin with.  The first half, almost always at 32
requests, is learned, and the second half, which ends at 1, is scored.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from accuracy_common import DATA, all_totals, count, errors, linear, markdown, number, qwen3_32b_on_b300, share
from pyarrow import csv

import fpmjax
from fpmjax import Knots, Observations, Status, Work, corrected, direct, learned, regression

SIZES = (1, 4)  # tensor parallel
SHARE, INNER, HALF = 0.6, 0.75, 0.5  # learned of each kind; of that, fitted while a choice is made; before the drain
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
EDGE = 1e-9  # e-folds: what rounding may cost at the edge of a box
HEADERS = ("work", "model", "scored", "refused", "MAPE %", "WAPE %", "bias %", "p50 %", "p90 %", "worst %")
SUPPORT = ("work", "model", "outside the box %", "of them flagged %", "interval holds, inside %", "outside %")
DRAIN = ("model", "MAPE %", "bias %", "worst %", "flagged %", "MAPE of those %", "of the others %", "interval holds %")


def rounds(tp: int) -> tuple[Observations, np.ndarray, np.ndarray]:
    """(the rounds of one run in order, the kind of work of each, the segment of the run)."""
    path = DATA / f"b300_vllm0201_fpm_rounds_qwen3_32b_tp{tp}.csv.gz"
    seen = Observations.read(path)
    prefill, decode = (count(seen.work, name) > 0 for name in ("prefill_tokens", "decode_requests"))
    segment = csv.read_csv(path)["segment"].to_numpy(zero_copy_only=False)
    return seen, np.where(prefill, np.where(decode, "mixed", "prefill"), "decode"), segment


def first_of_each(kind: np.ndarray, share: float) -> np.ndarray:
    """bool [n]: the first share of every kind."""
    first = np.zeros(len(kind), bool)
    for name in KINDS:
        rows = np.flatnonzero(kind == name)
        first[rows[: int(share * len(rows))]] = True
    return first


def ask(model: Any, work: Work) -> Any:
    """The estimate of one of our models, or of a way to predict, which always answers."""
    if not hasattr(model, "composition"):
        ms = model(work)
        return fpmjax.Estimate(ms, np.full(ms.shape, Status.OK), np.zeros(ms.shape, np.int32))
    return fpmjax.estimate(model, work, check=False)


def score(model: Any, seen: Observations) -> list[float]:
    """Scored, refused, and the errors in the order of `HEADERS`."""
    told = ask(model, seen.work)
    ok = told.status == Status.OK
    if not ok.any():
        return [0, len(ok), *([float("nan")] * 6)]
    wall = np.asarray(seen.wall_ms)[ok]
    error = errors(told.latency_ms[ok], wall)
    size = np.abs(error)
    wape = 100.0 * np.abs(told.latency_ms[ok] - wall).sum() / wall.sum()
    return [ok.sum(), (~ok).sum(), size.mean(), wape, error.mean(), *np.percentile(size, [50, 90]), size.max()]


def choose(seen: Observations, kind: np.ndarray) -> dict[str, dict[str, Any]]:
    """For every kind the options of the grid that do best on the last quarter of these rounds."""
    inner = first_of_each(kind, INNER)
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for options in GRID:
        model = regression(seen.where(inner), role="aggregated", **options)
        for name in KINDS:
            _, refused, error, *_ = score(model, seen.where(~inner & (kind == name)))
            error = np.inf if refused else error
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


def corners(work: Work) -> np.ndarray:
    """float64 [n, 6]: logs of decode requests, their KV, that of each; prompt tokens, those of each, cached KV.

    What the training box is made of, written down again: the flags of a model are checked against it.
    """
    names = ("decode_requests", "decode_kv", "prefill_requests", "prefill_tokens", "prefill_kv")
    batch, kv, prompts, tokens, cached = (count(work, name) for name in names)
    columns = (batch, kv, kv / np.maximum(batch, 1), tokens, tokens / np.maximum(prompts, 1), cached)
    return np.log(np.maximum(np.stack(columns, -1), 1.0))


def outside(before: Observations, work: Work) -> np.ndarray:
    """bool [n]: work with some size beyond what was seen before."""
    box, at = corners(before.work), corners(work)
    return ((at < box.min(0) - EDGE) | (at > box.max(0) + EDGE)).any(-1)


def in_words(options: dict[str, Any]) -> str:
    sign = "" if options["non_negative"] else ", signed"
    return f"{', '.join(options['feature_axes'])}{sign}, {options['max_observations']} rows"


def committees(before: Observations, tp: int, role: str) -> dict[str, Any]:
    return {
        "committee, hardware": learned(before, role=role, hardware=qwen3_32b_on_b300(tp)),
        "committee": learned(before, role=role),
    }


def run_section(tp: int) -> str:
    """The tables of one run, and what was chosen."""
    seen, kind, _ = rounds(tp)
    first = first_of_each(kind, SHARE)
    before = seen.where(first)
    chosen = choose(before, kind[first])
    fits = {str(options): regression(before, role="aggregated", **options) for options in chosen.values()}
    ours = committees(before, tp, "aggregated")
    table = direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=tp))
    common = {
        "regression, spline": regression(before, role="aggregated", spline=Knots()),
        "table": table,
        **{f"table, {policy}": corrected(table, before, policy=policy) for policy in POLICIES},
        **{f"table, {p}, in its own box": corrected(table, before, policy=p, **box_of(before)) for p in BOXED},
    }
    default = regression(before, role="aggregated")
    rows: list[tuple[str, ...]] = [HEADERS]
    support: list[tuple[str, ...]] = [SUPPORT]
    for name, words in KINDS.items():
        same, rest = before.where(kind[first] == name), seen.where(~first & (kind == name))
        models = ours | {"linear fit": linear(same, all_totals), "regression, default": default}
        for label, model in (models | {"regression, chosen": fits[str(chosen[name])]} | common).items():
            scored, refused, *values = score(model, rest)
            rows.append((words, label, f"{scored:.0f}", f"{refused:.0f}", *map(number, values)))
        for label, model in ours.items():
            support.append((words, label, *(number(x, 1) for x in support_of(model, same, rest))))
    return "\n\n".join(
        [
            f"**TP {tp}**, {int(first.sum()):,} rounds learned, {int((~first).sum()):,} scored",
            markdown(rows),
            "Chosen: " + "; ".join(f"{KINDS[name]}: {in_words(options)}" for name, options in chosen.items()) + ".",
            markdown(support),
        ]
    )


def support_of(model: Any, before: Observations, rest: Observations) -> tuple[float, float, float, float]:
    """Percent outside the box, of them flagged, and held by the interval inside and outside of it."""
    told, far = ask(model, rest.work), outside(before, rest.work)
    holds = inside_interval(told, rest)
    return share(far), share(told.support.extrapolated[far]), share(holds[~far]), share(holds[far])


def inside_interval(told: Any, seen: Observations) -> np.ndarray:
    wall = np.asarray(seen.wall_ms)
    return (told.interval.low_ms <= wall) & (wall <= told.interval.high_ms)


def live() -> str:
    """Both runs."""
    return "\n\n".join(run_section(tp) for tp in SIZES)


def drain() -> str:
    """The second half of real decode after the first half of it."""
    return "\n\n".join(drain_section(tp) for tp in SIZES)


def drain_section(tp: int) -> str:
    seen, kind, segment = rounds(tp)
    decode = seen.where((kind == "decode") & (segment == "real"))
    half = int(HALF * len(decode))
    before, after = decode[:half], decode[half:]
    models = committees(before, tp, "decode") | {
        "linear fit": linear(before),
        "regression, default": regression(before, role="decode"),
    }
    rows: list[tuple[str, ...]] = [DRAIN]
    for label, model in models.items():
        _, _, mape, _, bias, *_, worst = score(model, after)
        cells = [number(x) for x in (mape, bias, worst)]
        told = ask(model, after.work)
        if told.support is None:
            rows.append((label, *cells, *["-"] * 4))
            continue
        far = told.support.extrapolated
        error = np.abs(errors(told.latency_ms, np.asarray(after.wall_ms)))
        parts = [float(error[x].mean()) if x.any() else float("nan") for x in (far, ~far)]
        holds = share(inside_interval(told, after))
        rows.append((label, *cells, *(number(x, 1) for x in (share(far), *parts, holds))))
    title = f"**TP {tp}**, {half:,} rounds learned, {len(decode) - half:,} scored"
    return f"{title}\n\n{markdown(rows)}"
