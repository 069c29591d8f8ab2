"""Errors on B300 points and rounds that were taken away: `python calibration/b300_qwen3_32b/rebuild.py` (a minute)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from calibration.b300_qwen3_32b import fits, holdouts  # noqa: E402
from calibration.common import Result, command, fitted, number, result_of, signed, study_page, table  # noqa: E402
from calibration.panel import LOOKS, Panel, drawing, legend, steps  # noqa: E402
from fpmjax.progress import Progress  # noqa: E402
from fpmjax.status import Status  # noqa: E402

QUESTION = "How far off are answers for measurements of Qwen3-32B on B300 that the model has not seen?"
WAYS = {"rung": holdouts.without_a_rung, "point": holdouts.without_a_point}
GATES = {"rung": 2.0, "point": 1.3}  # percent, of the MAPE
WAY_WORDS = {"rung": "rung", "point": "KV point"}
BINS = ((1, 8), (9, 16), (17, 24), (25, 32))  # requests
EXAMPLES = ((3, 1024), (32, 8192), (40, 32768))
PLACES = {"narrow": "inside", "wide": "beyond"}


def measure() -> Result:
    with Progress("hold-outs", 6, unit="parts") as done:
        direct = {x.name: direct_errors(x) for x in holdouts.lattices()}
        done(1)
        widened, clocks = widened_coverage(), {f"TP{tp}": clock_difference(tp) for tp in holdouts.LIVE}
        done(2)
        on_lattices = deep(fits.on_lattices(), "point")
        done(4)
        live = deep(fits.on_live_rounds(), "round")
        done(5)
        drain = deep(fits.on_the_drain(), "round")
    decreasing = {x.name: holdouts.decreasing_steps(x.points) for x in holdouts.lattices()}
    other = holdouts.composed()
    numbers = {
        "settings": {
            "splits": fits.SPLITS,
            "fitted_percent": 100 * fits.FITTED,
            "narrow_most_batch": fits.NARROW,
            "wide_least_batch": min(
                int(x.points.batch[x.points.batch > fits.NARROW].min()) for x in (*holdouts.lattices(), other)
            ),
            "interval_percent": 100 * fits.LEVEL,
            "live_fitted_percent": 100 * fits.SHARE,
            "one_decode_round_in": fits.EVERY,
        },
        "gates": GATES,
        "direct": direct,
        "decreasing": decreasing | {"all": sum(decreasing.values())},
        "widened": widened,
        "clocks": clocks,
        "composed": {
            "lattice": other.name,
            "direct": direct_errors(other),
            "decreasing": holdouts.decreasing_steps(other.points),
            "fits": on_lattices.pop(other.name),
        },
        "lattice_fits": on_lattices,
        "live_fits": live,
        "drain": {f"TP{tp}": drained(tp) for tp in holdouts.LIVE},
        "drain_fits": drain,
    }
    return result_of(HERE, QUESTION, holdouts.DATA.glob("*.csv*"), numbers, answer)


def errors(predicted: np.ndarray, measured: np.ndarray, unit: str) -> dict[str, Any]:
    """Counts and errors of answers, each `unit` of them one vote; NaN are refusals."""
    ok = ~np.isnan(predicted)
    counts = {"asked": len(ok), "refused": int((~ok).sum())}
    if not ok.any():
        return counts
    error = 100 * (predicted[ok] - measured[ok]) / measured[ok]
    return counts | {
        f"equal_{unit}_mape": np.abs(error).mean(),
        "wape": 100 * np.abs(predicted[ok] - measured[ok]).sum() / measured[ok].sum(),
        f"equal_{unit}_bias": error.mean(),
        f"largest_{unit}_ape": np.abs(error).max(),
    }


def direct_errors(lattice: holdouts.Lattice) -> dict[str, Any]:
    out: dict[str, Any] = {"points": len(lattice.points)}
    for name, way in WAYS.items():
        rows, predicted = holdouts.held_out(lattice.points, way)
        measured = lattice.points.latency_ms[rows]
        worst = int(np.nanargmax(np.abs(predicted / measured - 1)))
        at = {"batch": lattice.points.batch[rows[worst]], "kv": lattice.points.kv[rows[worst]]}
        out[name] = errors(predicted, measured, "point") | {"largest_at": at}
    return out


def widened_coverage() -> dict[str, Any]:
    batch, kv = holdouts.widened()
    tables = {f"lattice {x.name}": x.points for x in holdouts.lattices() if x.name.startswith("B300")}
    tables |= {f"live rounds TP{tp}": holdouts.live_points(tp) for tp in holdouts.LIVE}
    inside = {name: int((~np.isnan(holdouts.ask(points, batch, kv))).sum()) for name, points in tables.items()}
    at = np.array(EXAMPLES).T
    ms = holdouts.ask(holdouts.lattices()[0].points, *at)
    examples = [{"batch": b, "kv": k, "ms": v} for (b, k), v in zip(EXAMPLES, ms.tolist(), strict=True)]
    least = holdouts.live_points(1)
    return {
        "asked": len(batch),
        "inside": inside,
        "examples": examples,
        "live_tp1_batch": int(least.batch.max()),
        "live_tp1_least_kv_at_it": int(least.kv[least.batch == least.batch.max()].min()),
    }


def clock_difference(tp: int) -> dict[str, Any]:
    batch, lattice, live = holdouts.two_clocks(tp)
    bins = {}
    for low, high in BINS:
        own = (low <= batch) & (batch <= high)
        bins[f"{low} to {high}"] = {
            "cells": int(own.sum()),
            "equal_cell_mape": 100 * np.abs(lattice[own] / live[own] - 1).mean(),
            "equal_cell_bias": 100 * (lattice[own] / live[own] - 1).mean(),
        }
    return errors(lattice, live, "cell") | {"by_batch": bins}


def deep(answers: Any, unit: str) -> Any:
    """The same tree with errors in place of answers: three digits, and whole percents of what intervals hold."""
    if isinstance(answers, Mapping):
        return {name: deep(inner, unit) for name, inner in answers.items()}
    found = errors(answers.predicted, answers.measured, unit)
    found = {name: fitted(x) if isinstance(x, float) else x for name, x in found.items()}
    if found["refused"]:
        refused = Counter(Status(x).code for x in answers.status[np.isnan(answers.predicted)].tolist())
        found["refused_as"] = dict(sorted(refused.items()))
    if not np.isnan(answers.low).all():
        held = (answers.low <= answers.measured) & (answers.measured <= answers.high)
        found["interval_holds_percent"] = round(100 * float(held.mean()))
        found["flagged_percent"] = round(100 * float(answers.flagged.mean()))
    return found


def drained(tp: int) -> dict[str, Any]:
    """What the two halves of a live run hold."""
    before, after = fits.halves(tp)
    batch, percent = fits.share_at_most(before)
    return {
        "fitted": len(before),
        "fitted_largest_batch": batch,
        "fitted_percent_at_it": percent,
        "asked_percent_at_it": fits.share_at_most(after)[1],
        "asked_least_batch": int(np.asarray(after.work.decode_requests).min()),
    }


def answer(r: Result) -> str:
    def over(way: str) -> str:
        mapes = [lattice[way]["equal_point_mape"] for lattice in r["direct"].values()]
        return f"{number(min(mapes))} to {number(max(mapes))} %"

    worst = max(lattice["rung"]["largest_point_ape"] for lattice in r["direct"].values())
    decode = [run["learned"]["decode"]["equal_round_mape"] for run in r["live_fits"].values()]
    drain = [f"{number(run['learned']['equal_round_mape'], 1)} % ({name})" for name, run in r["drain_fits"].items()]
    clocks = [clock["equal_cell_bias"] for clock in r["clocks"].values()]
    return f"""On the measured lattices the direct rule is off by {over("point")} (MAPE) where one KV point is missing
        and by {over("rung")} where a whole batch is, at most by {number(worst, 1)} %. The learned model, fitted to
        earlier live rounds, is off by {number(min(decode), 1)} to {number(max(decode), 1)} % (MAPE) on later decode
        rounds; fitted to the first half of a run that then drains, by {" and ".join(drain)}.
        Lattices lie {number(-max(clocks), 0)} to {number(-min(clocks), 0)} % below live
        rounds of the same engine on average. Their clocks differ, but whether that alone makes it these data cannot
        tell."""


def readme(r: Result) -> str:
    other = r["composed"]
    decreasing = ", ".join(f"{name}: {count}" for name, count in r["decreasing"].items() if name != "all")
    live_fits = [
        (name, model, kind, x["asked"], x["refused"], *told(x, "round"), *said(x))
        for name, models in r["live_fits"].items()
        for model, kinds in models.items()
        for kind, x in kinds.items()
    ]
    drain = [
        (name, model, x["asked"], x["refused"], *told(x, "round"), *said(x))
        for name, models in r["drain_fits"].items()
        for model, x in models.items()
    ]
    cells = sum(clock["asked"] for clock in r["clocks"].values())
    text = f"""The lattice of TP 1 and of TP 4, asked at the {cells} medians of live decode rounds per batch and bin of
        KV; every cell counts alike."""
    return study_page(
        HERE,
        r,
        direct=direct_table(r["direct"]),
        composed_direct=direct_table({other["lattice"]: other["direct"]}),
        composed_fits=fits_table({other["lattice"]: other["fits"]}),
        decreasing=decreasing,
        widened=table(("points of", "inside"), r["widened"]["inside"].items()),
        examples=table(
            ("requests", "KV tokens", "ms"),
            [(x["batch"], x["kv"], number(x["ms"], 3)) for x in r["widened"]["examples"]],
        ),
        clocks_text=text,
        first_bin_most=number(BINS[0][1]),
        clocks_table=table(
            ("run", *columns("cell")), [(n, x["asked"], x["refused"], *told(x, "cell")) for n, x in r["clocks"].items()]
        ),
        clocks_by_batch=table(
            ("requests", *(f"{run} cell {words} %" for run in r["clocks"] for words in ("MAPE", "bias"))),
            [
                (
                    f"{low} to {high}",
                    *(
                        shown(x["by_batch"][f"{low} to {high}"][name])
                        for x in r["clocks"].values()
                        for name, shown in (("equal_cell_mape", number), ("equal_cell_bias", signed))
                    ),
                )
                for low, high in BINS
            ],
        ),
        lattice_fits=fits_table(r["lattice_fits"]),
        live_fits=table(("run", "model", "work", *columns("round"), "held %", "flagged %"), live_fits),
        drain_tp4=max(x["equal_round_mape"] for x in r["drain_fits"]["TP4"].values()),
        drain=table(("run", "model", *columns("round"), "held %", "flagged %"), drain),
    )


def direct_table(lattices: Result) -> str:
    rows = [
        (name, WAY_WORDS[way], lattice[way]["asked"], lattice[way]["refused"], *told(lattice[way], "point"), GATES[way])
        for name, lattice in lattices.items()
        for way in WAYS
    ]
    return table(("lattice", "taken away", *columns("point"), "gate %"), rows)


def fits_table(lattices: Result) -> str:
    rows = [
        (name, model, PLACES[place], x["asked"], x["refused"], *told(x, "point"), *said(x))
        for name, models in lattices.items()
        for model, places in models.items()
        for place, x in places.items()
    ]
    return table(("lattice", "model", "points", *columns("point"), "held %", "flagged %"), rows)


def columns(unit: str) -> tuple[str, ...]:
    """The headers of counts and of what `told` tells."""
    return "asked", "refused", f"{unit} MAPE %", "WAPE %", f"{unit} bias %", "worst %"


def told(x: Result, unit: str) -> list[str]:
    names = (f"equal_{unit}_mape", "wape", f"equal_{unit}_bias", f"largest_{unit}_ape")
    return [number(x.get(name), 1 if abs(x.get(name) or 0) >= 10 else 2) for name in names]


def said(x: Result) -> list[str]:
    return [number(x.get(name)) for name in ("interval_holds_percent", "flagged_percent")]


def chart(r: Result) -> str:
    first, second, gate = LOOKS[0], LOOKS[1], LOOKS[4]
    parts: list[str] = []
    names = list(r["direct"])
    panel = Panel(60, 70, 250, 210, (0.4, len(names) + 0.6), (0.0, 2.5))
    ticks = [(i + 1.0, name.removeprefix("B300 ")) for i, name in enumerate(names)]
    panel.axes("Direct rule, points taken away", ticks, steps(0, 2.5, 0.5), "lattice", "MAPE, %")
    for i, name in enumerate(names):
        for shift, way, look in ((-0.2, "rung", first), (0.2, "point", second)):
            panel.bar(i + 1 + shift, 0.36, r["direct"][name][way]["equal_point_mape"], look)
    for level in GATES.values():
        panel.across(level, gate)
    parts += [
        *panel.parts,
        *legend(60, 346, [(first, "bar", "a batch"), (second, "bar", "a KV point"), (gate, "line", "gates")]),
    ]

    panel = Panel(380, 70, 200, 210, (0.4, len(BINS) + 0.6), (-25.0, 5.0))
    ticks = [(i + 1.0, f"{low}-{high}") for i, (low, high) in enumerate(BINS)]
    panel.axes("Lattice against live rounds", ticks, steps(-25, 5, 5), "requests", "bias, %")
    for shift, run, look in ((-0.2, "TP1", first), (0.2, "TP4", second)):
        for i, (low, high) in enumerate(BINS):
            panel.bar(i + 1 + shift, 0.36, r["clocks"][run]["by_batch"][f"{low} to {high}"]["equal_cell_bias"], look)
    parts += [*panel.parts, *legend(380, 346, [(first, "bar", "TP1"), (second, "bar", "TP4")])]

    panel = Panel(650, 70, 250, 210, (0.4, len(fits.KINDS) + 0.6), (0.0, 20.0))
    ticks = [(i + 1.0, kind) for i, kind in enumerate(fits.KINDS)]
    panel.axes("Fitted to earlier live rounds", ticks, steps(0, 20, 5), "work of later rounds", "MAPE, %")
    entries = []
    for j, (run, model) in enumerate((run, model) for run in ("TP1", "TP4") for model in ("learned", "regression")):
        look = LOOKS[j]
        entries.append((look, "bar", f"{run} {model}"))
        for i, kind in enumerate(fits.KINDS):
            panel.bar(i + 1 + 0.2 * (j - 1.5), 0.18, r["live_fits"][run][model][kind]["equal_round_mape"], look)
    parts += [*panel.parts, *legend(650, 346, entries)]
    words = "Bars: errors of the direct rule, difference of lattices and live rounds, errors of fitted models."
    return drawing(930, 420, "Qwen3-32B on B300: errors on measurements that the model has not seen", words, parts)


if __name__ == "__main__":
    command(HERE, measure, readme, chart)
