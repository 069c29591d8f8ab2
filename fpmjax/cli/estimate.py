"""`fpmjax estimate`: milliseconds for one iteration or for every combination of lists."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax import __version__
from fpmjax.cli.arguments import LIST, UsageError, add_command, add_table, counts, one_count, open_cell
from fpmjax.cli.evidence import Details, detail_lines
from fpmjax.cli.output import aligned, breakdown, ms, note, number, print_json
from fpmjax.cli.queries import Asked, explain, product, refusals, with_depths

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

ABOUT = f"""\
Work is given as lists, which are combined in every way, or as an engine's metrics.  Counts are totals of one
iteration and rank.  With a draft length the answer is one whole speculative round, draft and verification.

{LIST}"""
EXAMPLES = """\
  fpmjax estimate embedded --select tp=1 --batch 1,4,8 --kv 8192
  fpmjax estimate embedded --select tp=1 --batch 1:64 --kv-per-request 512:4096:x2 --draft-length 1:4
  fpmjax estimate TABLE --prefill-requests 1 --prefill-tokens 512 --batch 16 --kv 16384 --detail
  tail -n 100 iterations.jsonl | fpmjax estimate TABLE --metrics - --json
"""
COUNTS = ("prefill_requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
HEADERS = ("prefill requests", "new tokens", "prefill KV tokens", "batch", "KV tokens")


def add(commands: Any) -> None:
    parser = add_command(commands, "estimate", "milliseconds per forward pass", run, about=ABOUT, examples=EXAMPLES)
    add_table(parser)
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
        help="draft tokens per round, from 1 (default: ordinary decoding)",
    )
    other.add_argument(
        "--verify-width",
        metavar="W",
        type=one_count,
        default=1,
        help="look decode up at W rows per request, unscaled (default: 1)",
    )
    other.add_argument("--detail", action="store_true", help="add the measured rows and weights behind each number")


def run(args: argparse.Namespace) -> int:
    asked = read_work(args)
    cell = open_cell(args)
    from fpmjax.estimate import estimate
    from fpmjax.models.direct import direct
    from fpmjax.speculative import check_range
    from fpmjax.status import Status

    if args.draft_length:
        check_range(args.draft_length)
    model = direct(cell, verify_width=args.verify_width)
    result = estimate(model, asked.work, draft_length=asked.depth, check=False, evidence=args.detail)
    details = None
    if args.detail:
        stp: Any = getattr(result, "stp", result)
        width = (0 if asked.depth is None else asked.depth) + np.full(result.status.shape, args.verify_width)
        details = Details(cell, asked.work, stp.parts, width)
    answers = list(as_json(asked, result, details))
    refused = refusals(result.status)
    if args.json:
        print_json(document(args, cell, answers, refused))
    else:
        print("\n".join(as_text(asked, answers)))
    if not refused:
        return 0
    count, first = sum(refused.values()), explain(model, asked, int(np.argmax(result.status > Status.IDLE)))
    told = f"{count:,} of {len(answers):,} queries have no answer ({breakdown(refused)})"
    if count == len(answers):
        if count > 1:
            note(told)
        raise first
    note(f"{told}; the first: {first}")
    return 0


def read_work(args: argparse.Namespace) -> Asked:
    if not args.metrics:
        return product(args)
    given = [
        name
        for name in ("batch", "kv", "kv_per_request", "prefill_requests", "prefill_tokens", "prefill_kv")
        if getattr(args, name)
    ]
    if given:
        raise UsageError(f"--metrics says what is asked, so --{given[0].replace('_', '-')} cannot be given as well")
    from fpmjax.cli.traffic import metrics_file

    return with_depths(*metrics_file(args.metrics), args.draft_length)


def as_json(asked: Asked, result: Any, details: Details | None):
    """One dictionary per query, in order."""
    from fpmjax.status import Status

    words = {status.value: status.code for status in Status}
    work = [np.asarray(getattr(asked.work, name)).tolist() for name in COUNTS]
    for i, (status, latency, rank) in enumerate(
        zip(result.status.tolist(), result.latency_ms.tolist(), result.rank.tolist(), strict=True)
    ):
        answer: dict[str, Any] = {} if asked.label is None else {"at": asked.label[i]}
        answer["work"] = [dict(zip(COUNTS, values, strict=True)) for values in zip(*(f[i] for f in work), strict=True)]
        answer |= {"status": words[status], "latency_ms": number(latency), "rank": rank}
        if asked.depth is not None:
            answer |= {
                "draft_length": int(result.draft_length[i]),
                "scaling_factor": float(result.scaling_factor[i]),
                "stp_latency_ms": number(result.stp.latency_ms[i]),
                "calibrated": bool(result.calibrated[i]) and Status(status).answered,
            }
        if details is not None:
            answer["ranks"] = details.ranks(i)
        yield answer


def document(args: argparse.Namespace, cell: Cell, answers: list[dict], refused: dict[str, int]) -> dict[str, Any]:
    return {
        "fpmjax": __version__,
        "table": cell.path,
        "digest": cell.digest,
        "policy": cell.policy,
        "cell": dict(cell.identity),
        "verify_width": args.verify_width,
        "queries": answers,
        "answered": len(answers) - sum(refused.values()),
        "refused": refused,
    }


def as_text(asked: Asked, answers: list[dict[str, Any]]) -> list[str]:
    """Aligned columns; with details, the evidence under each line."""
    headers, rows = [], [[] for _ in answers]

    def column(header: str, values: list[str]) -> None:
        headers.append(header)
        for row, value in zip(rows, values, strict=True):
            row.append(value)

    if asked.label is not None:
        column("at", asked.label)
        column("ranks", [str(len(a["work"])) for a in answers])
    else:
        used = [name for name in COUNTS if any(a["work"][0][name] for a in answers)] or ["decode_requests"]
        for name, header in zip(COUNTS, HEADERS, strict=True):
            if name in used or (name == "decode_kv" and "decode_requests" in used):
                column(header, [f"{a['work'][0][name]:,}" for a in answers])
    if asked.depth is not None:
        column("draft", [str(a["draft_length"]) for a in answers])
    column("latency ms", [ms(a["latency_ms"]) for a in answers])
    if asked.depth is not None:
        column("= factor", [f"{a['scaling_factor']:g}" for a in answers])
        column("x STP ms", [ms(a["stp_latency_ms"]) for a in answers])
        column("in study", ["-" if a["latency_ms"] is None else "yes" if a["calibrated"] else "no" for a in answers])
    if asked.label is not None and any(len(a["work"]) > 1 for a in answers):
        column("slowest rank", ["-" if a["rank"] < 0 else str(a["rank"]) for a in answers])
    left: tuple[int, ...] = ()
    if any(a["status"] != "ok" for a in answers):
        left = (len(headers),)
        column("status", [a["status"] for a in answers])
    lines = aligned(headers, rows, left=left)
    if not answers or "ranks" not in answers[0]:
        return lines
    return [
        lines[0],
        *(x for line, a in zip(lines[1:], answers, strict=True) for x in (line, *detail_lines(a["ranks"]))),
    ]
