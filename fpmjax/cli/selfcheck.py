"""`fpmjax selfcheck`: answers of an independent oracle, replayed on this machine's device, bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax import __version__
from fpmjax.cli.arguments import UNEQUAL, add_command
from fpmjax.cli.output import aligned, print_json
from fpmjax.errors import FpmError

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell
    from fpmjax.work import Work

ABOUT = """\
Recorded questions to the embedded table and to a small awkward one are asked again.  The expected answers were made by
a plain-Python oracle that shares no code with this package.  On a CPU all of them are equal to the last bit; on another
device the count tells how far its arithmetic differs, in units in the last place (ulp).
"""
EXAMPLES = """\
  fpmjax selfcheck
  JAX_PLATFORMS=cpu fpmjax selfcheck --json
"""
COUNTS = ("prefill_requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
FIELDS = {"latency_ms": "{} ms", "status": "statuses", "rank": "slowest ranks"}
PHASES = ("prefill", "decode", "baseline")


@dataclass
class Line:
    """How one kind of answer compares: values that are equal to the last bit, and the largest distance of the rest."""

    kind: str
    answers: int = 0
    equal: int = 0
    worst_ulp: int | None = 0
    """None where a number stands beside a refusal, or where integers differ."""

    def compare(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Count elements; NaN equals NaN, and floats are compared as bits."""
        found = np.asarray(found)
        self.answers += expected.size
        if expected.dtype.kind != "f":
            same = expected == found
            self.worst_ulp = self.worst_ulp if same.all() else None
        else:
            gone = np.isnan(expected), np.isnan(found)
            bits = [np.where(g, 0.0, x).view(np.int64) for g, x in zip(gone, (expected, found), strict=True)]
            away = np.abs(bits[0] - bits[1])
            same = (gone[0] == gone[1]) & (away == 0)
            if (gone[0] != gone[1]).any():
                self.worst_ulp = None
            elif self.worst_ulp is not None:
                self.worst_ulp = max(self.worst_ulp, int(away.max(initial=0)))
        self.equal += int(same.sum())


def add(commands: Any) -> None:
    parser = add_command(
        commands, "selfcheck", "compare this machine's answers with recorded ones", run, about=ABOUT, examples=EXAMPLES
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def run(args: argparse.Namespace) -> int:
    import jax

    lines = check()
    answers, equal = sum(line.answers for line in lines), sum(line.equal for line in lines)
    device = jax.devices()[0]
    about = {"fpmjax": __version__, "jax": jax.__version__, "platform": device.platform, "device": device.device_kind}
    if args.json:
        print_json(about | {"answers": answers, "equal": equal, "kinds": [asdict(line) for line in lines]})
    else:
        rows = [[x.kind, f"{x.answers:,}", f"{x.equal:,}", distance(x)] for x in lines]
        print(f"fpmjax {__version__}, jax {jax.__version__}, {device.platform} ({device.device_kind})")
        print("\n".join(aligned(["answers of kind", "compared", "bit-equal", "worst ulp"], rows, left=[0])))
        print(f"{equal:,} of {answers:,} values are equal to the last bit")
    return 0 if equal == answers else UNEQUAL


def distance(line: Line) -> str:
    return "-" if line.worst_ulp is None else f"{line.worst_ulp:,}"


def check() -> list[Line]:
    """Every recorded answer against this machine's."""
    from fpmjax.data import embedded_table
    from fpmjax.tables.load import load_cells

    with np.load(embedded_table().with_name("selfcheck.npz"), allow_pickle=False) as file:
        golden = dict(file)
    embedded = load_cells(embedded_table())
    if embedded.digest != str(golden["digest"]):
        raise FpmError(
            "the recorded answers belong to another embedded table\nhint: install fpmjax again", code="selfcheck"
        )
    cells = {"embedded": embedded.select(tp=1), "awkward": awkward_cell(golden)}
    lines: dict[str, Line] = {}
    for name, cell in cells.items():
        answers = {key[len(name) + 1 :]: value for key, value in golden.items() if key.startswith(f"{name}.")}
        for kind, expected, found in comparisons(cell, answers):
            lines.setdefault(kind, Line(kind)).compare(expected, found)
    return list(lines.values())


def awkward_cell(golden: Mapping[str, np.ndarray]) -> Cell:
    """The made-up table that travels with its answers."""
    from fpmjax.tables.cell import Cell, Points
    from fpmjax.tables.identity import Identity

    decode, batch, tokens, kv = golden["awkward.points"].T
    ms, row = golden["awkward.latency_ms"], np.arange(decode.size)
    phases = [
        Points.of(batch[of], tokens[of], kv[of], ms[of], row[of]) for of in (decode.astype(bool), ~decode.astype(bool))
    ]
    return Cell(Identity(*["made-up"] * 9, *[1] * 6), *phases)  # type: ignore[arg-type]


def comparisons(cell: Cell, golden: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, Any]]:
    """(kind, expected, found) of everything that is recorded about one cell."""
    from fpmjax.estimate import SMALL, estimate
    from fpmjax.models.direct import direct
    from fpmjax.work import Work

    model = direct(cell)
    for phase, points in (("decode", cell.decode), ("prefill", cell.prefill)):
        given = (points.kv,) if phase == "decode" else (points.tokens, points.kv)
        found = estimate(model, getattr(Work, phase)(points.batch, *given), check=False)
        yield "recorded points", points.latency_ms, found.latency_ms
    for kind in ("decode", "prefill", "mixed"):
        work = work_of(golden[f"{kind}.work"])
        found = estimate(model, work, check=False)
        for field, name in FIELDS.items():
            yield name.format(kind), golden[f"{kind}.{field}"], getattr(found, field)
        few = SMALL // work.ranks  # so few are answered in plain Python, without a device
        pieces = [estimate(model, each(work, slice(i, i + few)), check=False) for i in range(0, work.shape[0], few)]
        for field in FIELDS:
            found = np.concatenate([getattr(piece, field) for piece in pieces])
            yield "the same in plain Python", golden[f"{kind}.{field}"], found
    parts = estimate(model, work_of(golden["mixed.work"]), check=False, evidence=True).parts  # type: ignore[union-attr]
    asked = golden["mixed.resolution"] >= 0  # a refused query records nothing, whichever of its parts were found
    for i, phase in enumerate(PHASES):
        evidence, of = getattr(parts, phase), asked[..., i]
        yield f"{phase} part ms", golden["mixed.parts_ms"][..., i][of], getattr(parts, f"{phase}_ms")[of]
        yield "evidence: how", golden["mixed.resolution"][..., i][of], evidence.resolution[of]
        yield "evidence: rows", *compact(golden["mixed.row"][..., i, :][of], evidence.row[of], evidence.row[of] >= 0)
        yield (
            "evidence: weights",
            *compact(golden["mixed.weight"][..., i, :][of], evidence.weight[of], evidence.row[of] >= 0),
        )
    work, depth = work_of(golden["speculative.work"]), golden["speculative.draft_length"]
    found = estimate(model, work, draft_length=depth, check=False)
    yield "speculative ms", golden["speculative.latency_ms"], found.latency_ms
    yield "statuses", golden["speculative.status"], found.status


def work_of(counts: np.ndarray) -> Work:
    """uint32 [n, ranks, 5] as work."""
    from fpmjax.work import Work

    return Work.of(**dict(zip(COUNTS, np.moveaxis(counts, -1, 0), strict=True)), ranks=True)


def each(work: Work, some: slice) -> Work:
    import jax

    return jax.tree.map(lambda x: x[some], work)


def compact(expected: np.ndarray, found: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Support with the unused slots last, as the oracle writes it; the order of the others is kept."""
    order = np.argsort(~used, axis=-1, kind="stable")
    return expected, np.take_along_axis(found, order, -1)
