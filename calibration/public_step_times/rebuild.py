"""The fixed rule against public step times: `python calibration/public_step_times/rebuild.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from calibration.common import Result, command, number, result_of, signed, study_page, table  # noqa: E402
from calibration.panel import LOOKS, Panel, drawing, legend, steps  # noqa: E402
from calibration.public_step_times import anchors  # noqa: E402
from fpmjax.rule import PUBLISHED  # noqa: E402
from fpmjax.study.refit import refit  # noqa: E402
from fpmjax.study.scored import Scored  # noqa: E402
from fpmjax.study.statistics import errors  # noqa: E402

QUESTION = "Does the fixed rule 0.08 d + 1.25 hold on the step times that others have published?"
MOST = 16  # requests in the descriptive refit
OTHER = "vLLM PR 32374, early file"  # the other source that has scored rounds


def measure() -> Result:
    sources, rounds, unmatched = [], [], []
    small: dict[str, Scored] = {}
    numbers: dict[str, Any] = {"rows": len(anchors.read_rows(anchors.DATA / "step_times.csv"))}
    for source in anchors.sources():
        study = anchors.study_of(source)
        scored = anchors.scored_of(study)
        predicted = scored.predict(PUBLISHED)
        own = [{"source": source["name"], **row} for row in anchors.rounds_over_own_batch(source)]
        told = each(scored, predicted)
        seen = {(row["batch"], row["draft_length"]) for row in told}
        unmatched += [row for row in own if (row["batch"], row["draft_length"]) not in seen]
        rounds += [{"source": source["name"], **row} for row in told]
        sources.append(
            {"source": source["name"], "scope": source["scope"], "unstated": source["unstated"]}
            | {"ordinary_steps": len(anchors.ordinary(source)), "speculative_rounds": len(own)}
            | errors(predicted, scored.measured_ms)
        )
        small[source["name"]] = scored.where(anchors.batch_of(scored) <= MOST)
        if source["name"] == anchors.GOODPUT_SOURCE:
            numbers["goodput"] = goodput(source, scored)
    numbers["refit"] = descriptive(small)
    worst = max(unmatched, key=lambda row: row["over_own_batch"])
    beside = [r for r in unmatched if all(r[k] == worst[k] for k in ("source", "batch")) and r is not worst]
    neighbour = max(beside, key=lambda row: row["draft_length"])
    numbers |= {
        "sources": sources,
        "rounds": rounds,
        "scored": len(rounds),
        "over_predicted": sum(row["error_percent"] > 0 for row in rounds),
        "without_reference": len(unmatched),
        "unmatched": unmatched,
        "outlier": worst
        | {f"neighbour_{name}": neighbour[name] for name in ("draft_length", "round_ms", "over_own_batch")},
        "largest_loss_percent": max(row["loss_percent"] for row in numbers["goodput"]),
        "position_rates": anchors.position_rates(),
        "acceptance": anchors.iid_errors(),
    }
    numbers["batches"] = len(numbers["goodput"])
    chosen = [row for row in numbers["goodput"] if len(row["candidates_of_rule"]) > 1]
    numbers["batches_with_a_choice"] = len(chosen)
    numbers["same_choice"] = sum(row["best_by_measured"] == row["best_by_rule"] for row in chosen)
    numbers["draft_lengths"] = anchors.DEPTHS
    numbers["datasets"] = len({row["dataset"] for row in numbers["acceptance"]})
    return result_of(HERE, QUESTION, anchors.DATA.glob("*.csv"), numbers, answer)


def each(scored: Scored, predicted: np.ndarray) -> list[dict[str, Any]]:
    """One entry per round that has a reference, by batch and draft length."""
    columns = (
        anchors.batch_of(scored),
        scored.depth,
        scored.widened,
        scored.reference_ms,
        scored.measured_ms,
        scored.measured_ms / scored.reference_ms,
        predicted / scored.reference_ms,
        100 * (predicted - scored.measured_ms) / scored.measured_ms,
    )
    names = ("batch", "draft_length", "widened_batch", "reference_ms", "round_ms", "ratio", "factor", "error_percent")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sorted((dict(zip(names, row, strict=True)) for row in rows), key=lambda r: (r["batch"], r["draft_length"]))


def descriptive(small: dict[str, Scored]) -> dict[str, Any]:
    """A refit to the anchors of one source, which is a description of them and no rule, and what it is for the other.

    small: the scored rounds of each source with at most `MOST` requests.
    """
    scored, other = small[anchors.GOODPUT_SOURCE], small[OTHER]
    found = refit(scored, anchors=True)
    apart = 100 * (found.predict(other) - other.measured_ms) / other.measured_ms
    mapes = [errors(p, scored.measured_ms) for p in (scored.predict(PUBLISHED), found.predict(scored))]
    return {
        "source": anchors.GOODPUT_SOURCE,
        "most_batch": MOST,
        "descriptive_only": found.anchors_only,
        "rounds": found.rounds,
        "loss": found.loss,
        "weights": found.weights,
        "slope": found.slope,
        "intercept": found.intercept,
        "rule_round_weighted_mape": mapes[0]["round_weighted_mape"],
        "refit_round_weighted_mape": mapes[1]["round_weighted_mape"],
        "refit_round_weighted_bias": mapes[1]["round_weighted_bias"],
        "other": {
            "source": OTHER,
            "rounds": len(apart),
            "refit_round_weighted_mape": np.abs(apart).mean(),
            "least_error_percent": apart.min(),
            "largest_error_percent": apart.max(),
        },
    }


def goodput(source: dict[str, str], scored: Scored) -> list[dict[str, Any]]:
    """Of each batch the best draft length by measured and by the rule's times, and what following the rule loses."""
    batches, measured, ruled = anchors.payoffs(source, scored)
    out = []
    for i, batch in enumerate(batches):
        chosen = int(ruled.best.draft_length[i])
        reached = float(measured.by_depth.goodput_per_ms[i, anchors.DEPTHS.index(chosen)])
        best = float(measured.best.goodput_per_ms[i])
        out.append(
            {
                "batch": batch,
                "best_by_measured": int(measured.best.draft_length[i]),
                "best_by_rule": chosen,
                "candidates_of_rule": [d for d, ok in zip(anchors.DEPTHS, ruled.candidate[i], strict=True) if ok],
                "measured_speedup": float(measured.best.speedup[i]),
                "loss_percent": 100 * (1 - reached / best),
            }
        )
    return out


def answer(r: Result) -> str:
    sources = [x for x in r["sources"] if x["rounds"]]
    bias = " and ".join(f"{number(x['round_weighted_bias'], 0)} %" for x in sources)
    fit = r["refit"]
    return f"""Not as it stands: on {r["scored"]} rounds that have a reference it is too high by {bias} on average, by
        source, and most where many tokens share a round. Fitted to the {fit["rounds"]} rounds of one
        source that have at most {fit["most_batch"]} requests, the slope is {fit["slope"]:.3f} and the intercept
        {fit["intercept"]:.2f}; on the {fit["other"]["rounds"]} such rounds of the other source that pair
        errs by {signed(fit["other"]["least_error_percent"], 0)} to
        {signed(fit["other"]["largest_error_percent"], 0)} %.
        The slope is near the rule's, the intercept is not. These are anchors, not fit data, and that pair is no
        rule."""


def readme(r: Result) -> str:
    fields = ("round_weighted_mape", "round_weighted_bias", "wape", "max_round_ape")
    shown = ("source", "batch", "draft_length", "widened_batch", "reference_ms", "round_ms")
    iid = []
    for method in sorted({x["method"] for x in r["acceptance"]}):
        for depth in sorted({x["draft_length"] for x in r["acceptance"]}):
            own = [x for x in r["acceptance"] if (x["method"], x["draft_length"]) == (method, depth)]
            found = [x["error_percent"] for x in own]
            counted = number(fmean(x["counted"] for x in own))
            iid.append((method, depth, counted, signed(min(found), 1), signed(max(found), 1)))
    return study_page(
        HERE,
        r,
        sources=table(
            ("source", "ordinary steps", "rounds", "what was timed", "not stated"),
            [
                (x["source"], x["ordinary_steps"], x["speculative_rounds"], x["scope"], x["unstated"])
                for x in r["sources"]
            ],
        ),
        by_source=table(
            ("source", "scored", "round-weighted MAPE %", "round-weighted bias %", "WAPE %", "largest %"),
            [(x["source"], x["rounds"], *(number(x[f]) for f in fields)) for x in r["sources"]],
        ),
        rounds=table(
            ("source", "B", "d", "(d + 1) B", "F ms", "T ms", "r", "rule", "error %"),
            [
                (*(x[name] for name in shown), number(x["ratio"], 3), x["factor"], signed(x["error_percent"], 1))
                for x in r["rounds"]
            ],
        ),
        unmatched=table(
            ("source", "B", "d", "T ms", "T over F(B)", "rule"),
            [
                (x["source"], x["batch"], x["draft_length"], x["round_ms"], number(x["over_own_batch"], 3), x["factor"])
                for x in r["unmatched"]
            ],
        ),
        depths=", ".join(map(number, r["draft_lengths"])),
        rates=", ".join(f"{x:g}" for x in r["position_rates"]),
        goodput=table(
            ("B", "best d, measured", "rule chose from", "best d, rule", "measured speedup", "lost by its choice %"),
            [
                (
                    x["batch"],
                    x["best_by_measured"],
                    "d = " + ", ".join(map(number, x["candidates_of_rule"])),
                    x["best_by_rule"],
                    x["measured_speedup"],
                    x["loss_percent"],
                )
                for x in r["goodput"]
            ],
        ),
        iid=table(("drafts", "d", "tokens per round", "least", "most"), iid),
    )


def chart(r: Result) -> str:
    rule, fit, found = LOOKS[4], LOOKS[5], r["refit"]
    parts: list[str] = []
    panel = Panel(60, 70, 330, 250, (0.0, 8.0), (0.8, 2.0))
    panel.axes(
        "Round over ordinary step of (d + 1) B", steps(0, 8, 1), steps(0.8, 2.0, 0.2), "draft length d", "r = T / F"
    )
    panel.line([(0.0, float(PUBLISHED.intercept)), (8.0, float(PUBLISHED.factor(8)))], rule)
    panel.line([(0.0, found["intercept"]), (8.0, found["intercept"] + 8 * found["slope"])], fit)
    entries = [(rule, "line", "rule 0.08 d + 1.25")]
    entries.append(
        (
            fit,
            "line",
            f"descriptive, B up to {found['most_batch']}: {found['slope']:.3f} d + {found['intercept']:.2f}",
        )
    )
    groups = (
        ("vLLM PR 32374", False, LOOKS[0]),
        ("vLLM PR 32374", True, LOOKS[1]),
        ("vLLM PR 32374, early file", False, LOOKS[2]),
        ("vLLM PR 32374, early file", True, LOOKS[3]),
    )
    for name, large, look in groups:
        own = [x for x in r["rounds"] if x["source"] == name and (x["batch"] > MOST) == large]
        panel.marks([(x["draft_length"], x["ratio"]) for x in own], look)
        entries.append((look, "mark", f"{name}, B {'above' if large else 'up to'} {MOST}"))
    parts += [*panel.parts, *legend(60, 388, entries)]

    panel = Panel(480, 70, 330, 250, (0.0, 6.0), (1.0, 3.0))
    panel.axes("Tokens per round, mean of data sets", steps(0, 6, 1), steps(1, 3, 0.5), "draft length d", "E(d)")
    entries = []
    for method, look in (("eagle", LOOKS[0]), ("ngram", LOOKS[1])):
        for field, words in (("counted", "counted"), ("iid_formula", "i.i.d. formula through d = 1")):
            depths = sorted({x["draft_length"] for x in r["acceptance"]})
            means = [
                fmean(x[field] for x in r["acceptance"] if (x["method"], x["draft_length"]) == (method, d))
                for d in depths
            ]
            points = list(zip(map(float, depths), means, strict=True))
            if field == "counted":
                panel.marks(points, look)
                entries.append((look, "mark", f"{method}, {words}"))
            else:
                panel.line(points, look)
                entries.append((look, "line", f"{method}, {words}"))
    parts += [*panel.parts, *legend(480, 388, entries)]
    words = "Left: ratios of public speculative rounds and two lines. Right: accepted tokens, counted and by formula."
    return drawing(850, 500, "Public step times against the fixed rule (anchors only)", words, parts)


if __name__ == "__main__":
    command(HERE, measure, readme, chart)
