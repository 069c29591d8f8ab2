"""`fpmjax estimate`: milliseconds for one iteration or for every combination of lists."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fpmjax import __version__
from fpmjax.cli import study
from fpmjax.cli.arguments import LIST, UsageError, add_command, counts, one_count
from fpmjax.cli.describe import cell_of, level_in_words
from fpmjax.cli.evidence import Details, detail_lines
from fpmjax.cli.flags import add_rule, rule_of
from fpmjax.cli.output import ALL_IDLE, aligned_lines, breakdown, ms, note, number, print_json_with
from fpmjax.cli.queries import Asked, answered, at_depths, product, refusals
from fpmjax.cli.saved import about, add_model, open_model

ABOUT = f"""\
MODEL is a table, a saved model that `fpmjax fit` wrote, or a learned artifact.  Work is given as lists, which are
combined in every way, or as an engine's metrics.  Counts are totals of one iteration and rank.  With a draft length
the answer is one whole speculative round, draft and verification; 0 among draft lengths is ordinary decoding.

`in study range` (in_study_range of a query in JSON, null at draft length 0) tells whether batch, KV and draft length
lie inside the study behind the round's factor.  It ran TP1, BF16, which is not compared with the cell: see the last
line, or `study` in JSON.  With --rule the factor is that of another study, which the last line (`rule` in JSON) names.

A model that knows its own errors adds the range in which it expects the measured time (`90 % range`, `interval` in
JSON), and one that was learned whether a query lies inside of what was observed: `supported`, or `extrapolated` and by
how many e-folds; 0.7 is a factor of 2.  The range is a promise for supported queries only, and holds the error of the
model, not that of a round's factor.

{LIST}"""
EXAMPLES = """\
  fpmjax estimate embedded --select tp=1 --batch 1,4,8 --kv 8192
  fpmjax estimate embedded --select tp=1 --batch 1:64 --kv-per-request 512:4096:x2 --draft-length 1:4
  fpmjax estimate TABLE --prefill-requests 1 --prefill-tokens 512 --batch 16 --kv 16384 --detail
  tail -n 100 iterations.jsonl | fpmjax estimate TABLE --metrics - --json
  fpmjax estimate model.npz --batch 8 --kv-per-request 4096 --draft-length 0:4
"""
COUNTS = ("prefill_requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
HEADERS = ("prefill requests", "new tokens", "prefill KV tokens", "batch", "KV tokens")


def add(commands: Any) -> None:
    parser = add_command(commands, "estimate", "milliseconds per forward pass", run, about=ABOUT, examples=EXAMPLES)
    add_model(parser)
    decode = parser.add_argument_group("decode work")
    decode.add_argument("--batch", metavar="LIST", type=counts, help="decode requests in the iteration")
    kv = decode.add_mutually_exclusive_group()
    kv.add_argument("--kv", metavar="LIST", type=counts, help="past KV tokens, summed over the requests")
    kv.add_argument("--kv-per-request", metavar="LIST", type=counts, help="past KV tokens of each request")
    prefill = parser.add_argument_group("prefill work (with decode work: a mixed iteration)")
    prefill.add_argument("--prefill-requests", metavar="LIST", type=counts, help="requests that compute new tokens")
    prefill.add_argument("--prefill-tokens", metavar="LIST", type=counts, help="tokens they compute, in total")
    prefill.add_argument("--prefill-kv", metavar="LIST", type=counts, help="cached tokens they read (default: 0)")
    other = parser.add_argument_group("other")
    other.add_argument(
        "--metrics",
        metavar="FILE",
        help="ForwardPassMetrics instead of lists: one JSON document, or JSON lines; - is stdin",
    )
    other.add_argument(
        "--draft-length",
        metavar="LIST",
        type=counts,
        help="draft tokens per round, 0 for none (default: ordinary decoding)",
    )
    add_rule(other)
    other.add_argument(
        "--verify-width",
        metavar="W",
        type=one_count,
        default=1,
        help="look decode up at W rows per request, unscaled (default: 1)",
    )
    other.add_argument("--detail", action="store_true", help="add the measured rows and weights behind each number")


def run(args: argparse.Namespace) -> int:
    pieces = read_work(args)
    rule = rule_of(args, drafted=any(args.draft_length or ()))
    model = open_model(args, verify_width=args.verify_width)
    cell = cell_of(model)
    from fpmjax.speculative import check_range
    from fpmjax.status import Status

    for depth in args.draft_length or ():
        if depth:
            check_range(depth)
    found = answered(model, pieces, rule=rule, evidence=args.detail)
    asked, result = found.asked, found.result
    details = None
    stp: Any = getattr(result, "stp", result)
    if args.detail and (cell is None or stp.parts is None):
        note("--detail has nothing to add: a fitted model answers without measured rows")
    elif args.detail and cell is not None:
        width = (0 if asked.depth is None else asked.depth) + np.full(result.status.shape, args.verify_width)
        details = Details(cell, asked.work, stp.parts, width)
    queries, refused = len(result.status), refusals(result.status)
    if args.json:
        head = document(args, model, asked, queries, refused, rule)
        print_json_with(head, "queries", as_json(asked, result, details, rule))
    else:
        for line in as_text(asked, result, details, rule):
            print(line)
        if any_round(asked):
            print(study.legend(cell) if rule is None else study.rule_legend(rule))
    if asked.label is not None and (result.status == Status.IDLE).all():
        note(ALL_IDLE)
    if found.reason is None:
        return 0
    count = sum(refused.values())
    told = f"{count:,} of {queries:,} queries have no answer ({breakdown(refused)})"
    if count == queries:
        if count > 1:
            note(told)
        raise found.reason
    note(f"{told}, for example: {found.reason}")
    return 0


def any_round(asked: Asked) -> bool:
    return asked.depth is not None and bool(asked.depth.any())


def read_work(args: argparse.Namespace) -> Iterable[Asked]:
    """The queries, those of a metrics file piece by piece as it is read."""
    if not args.metrics:
        return [product(args)]
    given = [
        name
        for name in ("batch", "kv", "kv_per_request", "prefill_requests", "prefill_tokens", "prefill_kv")
        if getattr(args, name)
    ]
    if given:
        raise UsageError(f"--metrics says what is asked, so --{given[0].replace('_', '-')} cannot be given as well")
    from fpmjax.cli.traffic import metrics_file

    return at_depths(metrics_file(args.metrics), args.draft_length)


def as_json(asked: Asked, result: Any, details: Details | None, rule: Any = None) -> Iterator[dict[str, Any]]:
    """One dictionary per query, in order; with a rule of the user's own nothing is known of its study's range."""
    from fpmjax.status import Status

    words = {status.value: status.code for status in Status}
    stp = getattr(result, "stp", result)
    work = [np.asarray(getattr(asked.work, name)) for name in COUNTS]
    for i in range(len(result.status)):
        status, latency, rank = (x[i].item() for x in (result.status, result.latency_ms, result.rank))
        answer: dict[str, Any] = {} if asked.label is None else {"at": asked.label[i]}
        ranks = zip(*(field[i].tolist() for field in work), strict=True)
        answer["work"] = [dict(zip(COUNTS, values, strict=True)) for values in ranks]
        answer |= {"status": words[status], "latency_ms": number(latency), "rank": rank}
        if asked.depth is not None:
            depth = int(result.draft_length[i])
            answer |= {
                "draft_length": depth,
                "scaling_factor": float(result.scaling_factor[i]),
                "stp_latency_ms": number(result.stp.latency_ms[i]),
                "in_study_range": bool(result.calibrated[i]) and Status(status).answered
                if depth and not rule
                else None,
            }
        if stp.correction is not None:
            answer |= {
                "native_latency_ms": number(stp.native_ms[i]),
                "correction_factor": number(stp.factor[i]),
            }
        if result.interval is not None:
            answer["interval"] = interval_of(result.interval, i)
        if result.support is not None:
            answer["support"] = support_of(result.support, i)
        if details is not None:
            answer["ranks"] = details.ranks(i)
        yield answer


def interval_of(interval: Any, i: int) -> dict[str, Any] | None:
    """One query's range in milliseconds; None where there is none."""
    low, high = float(interval.low_ms[i]), float(interval.high_ms[i])
    if low != low or high != high:
        return None
    return {"low_ms": low, "high_ms": high, "level": interval.level, "calibrated_on": int(interval.count[i])}


def range_in_words(interval: dict[str, Any] | None) -> str:
    return "-" if interval is None else f"{interval['low_ms']:.4g}..{interval['high_ms']:.4g}"


def support_of(support: Any, i: int) -> dict[str, Any] | None:
    """Where one query lies; None where there is no answer, or a model that does not say."""
    distance = float(support.distance[i])
    if distance != distance:
        return None
    return {"extrapolated": distance > 0, "e_folds": distance, "model_spread": number(support.model_spread[i])}


def support_in_words(support: dict[str, Any] | None) -> str:
    if support is None:
        return "-"
    return f"extrapolated {support['e_folds']:.2f}" if support["extrapolated"] else "supported"


def document(
    args: argparse.Namespace, model: Any, asked: Asked, queries: int, refused: dict[str, int], rule: Any
) -> dict[str, Any]:
    factor: dict[str, Any] = {}
    if any_round(asked):
        factor = study.rule_document(args.rule, rule) if rule else {"study": study.document(cell_of(model))}
    return {
        "fpmjax": __version__,
        **about(args, model),
        "verify_width": model.verify_width,
        **factor,
        "queries": [],
        "answered": queries - sum(refused.values()),
        "refused": refused,
    }


def as_text(asked: Asked, result: Any, details: Details | None, rule: Any = None) -> Iterator[str]:
    """Aligned columns; with details, the evidence under each line."""
    headers, cells = [], []

    def column(header: str, cell: Callable[[dict[str, Any]], str]) -> None:
        headers.append(header)
        cells.append(cell)

    work, stp = asked.work, getattr(result, "stp", result)
    if asked.label is not None:
        column("at", lambda a: a["at"])
        column("ranks", lambda a: str(len(a["work"])))
    else:
        used = [name for name in COUNTS if np.any(getattr(work, name))] or ["decode_requests"]
        for name, header in zip(COUNTS, HEADERS, strict=True):
            if name in used or (name == "decode_kv" and "decode_requests" in used):
                column(header, lambda a, name=name: f"{a['work'][0][name]:,}")
    if asked.depth is not None:
        column("draft", lambda a: str(a["draft_length"] or "none"))
    column("latency ms", lambda a: ms(a["latency_ms"]))
    if asked.depth is not None:
        column("= factor", lambda a: f"{a['scaling_factor']:g}" if a["draft_length"] else "-")
        column("x STP ms", lambda a: ms(a["stp_latency_ms"]) if a["draft_length"] else "-")
        words = {True: "yes", False: "no", None: "-"}
        if rule is None:
            column(study.IN_RANGE, lambda a: "-" if a["latency_ms"] is None else words[a["in_study_range"]])
    if stp.correction is not None:
        column("correction", lambda a: "-" if a["latency_ms"] is None else f"{a['correction_factor']:.4f}")
        column("native ms", lambda a: ms(a["native_latency_ms"]))
    if result.interval is not None:
        header = f"{level_in_words(result.interval.level)} range"
        column(header, lambda a: range_in_words(a["interval"]))
    if result.support is not None:
        column("support", lambda a: support_in_words(a["support"]))
    if asked.label is not None and work.ranks > 1:
        column("slowest rank", lambda a: "-" if a["rank"] < 0 else str(a["rank"]))
    left: tuple[int, ...] = ()
    if result.status.any():  # all but `ok`, which is 0
        left = (len(headers),)
        column("status", lambda a: a["status"])

    def rows() -> Iterator[list[str]]:
        return ([cell(a) for cell in cells] for a in as_json(asked, result, None, rule))

    lines = aligned_lines(headers, rows, left=left)
    yield next(lines)
    for i, line in enumerate(lines):
        yield line
        if details is not None:
            yield from detail_lines(details.ranks(i))
