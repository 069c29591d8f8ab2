"""What a model is and what it holds: lines for people, and the same for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

FORMS = {"linear": "linear", "broad": "roofline", "datasheet": "roofline with the hardware given"}
AXES = {
    "decode_requests": "batch",
    "decode_rows": "padded batch of all ranks",
    "decode_kv": "KV",
    "decode_kv_per_request": "KV per request",
    "prefill_tokens": "new tokens",
    "prefill_tokens_per_request": "new tokens per request",
    "prefill_kv": "cached KV",
}


def cell_of(model: Any) -> Cell | None:
    """The measured cell behind a model."""
    return getattr(model, "cell", None)


def in_words(model: Any) -> list[str]:
    """What a model is and what it holds, a line each: `kind`, then its stores."""
    words = WORDS.get(type(model).__name__)
    if words is not None:
        return words(model)
    cell = cell_of(model)
    return [f"kind      direct rule over {'arrays' if cell is None else cell.identity}"]


def contents(model: Any) -> dict[str, Any]:
    """The same for JSON."""
    kind = type(model).__name__
    if kind in CONTENTS:
        return {"kind": kind} | CONTENTS[kind](model)
    cell = cell_of(model)
    named = {} if cell is None else {"table": cell.path, "digest": cell.digest, "cell": dict(cell.identity)}
    return {"kind": kind, "verify_width": model.verify_width} | named


def inside(name: str, model: Any) -> list[str]:
    """The lines of a model that is part of another one, under the name of that part."""
    return [f"{name:<9} {' '.join(line.split()[1:])}" for line in in_words(model)]


def level_in_words(level: float) -> str:
    return f"{100.0 * level:g} %"


# Regressions and corrections


def regression_in_words(model: Any) -> list[str]:
    kind = "spline" if model.learners.spline is not None else "linear"
    return [
        f"kind      {kind} regression of {model.role} work{refits_in_words(model)}",
        f"axes      {', '.join(model.feature_axes)}; retained over {', '.join(model.sampling_axes)}",
        *(f"store     {store_in_words(store)}" for store in model.stores),
    ]


def refits_in_words(model: Any) -> str:
    """What is unusual about its slopes and about when they are fitted."""
    rules = model.rules
    signed = "" if rules.non_negative else ", signed slopes"
    lazy = ", refitted where rows are missed" if rules.lazy else ""
    anew = f" or {int(rules.interval):,} changes made" if rules.interval else ""
    return signed + lazy + anew


def store_in_words(store: dict[str, Any]) -> str:
    ready = "ready" if store["ready"] else "not ready"
    knots = ", knots in use" if store.get("spline", {}).get("ready") else ""
    return f"{store['workload_kind']}: {ready}, {store['retained_observations']:,} observations retained{knots}"


def regression_contents(model: Any) -> dict[str, Any]:
    return {
        "role": model.role,
        "feature_axes": list(model.feature_axes),
        "sampling_axes": list(model.sampling_axes),
        "signed": not model.rules.non_negative,
        "lazy": bool(model.rules.lazy),
        "rebuild_interval": int(model.rules.interval) or None,
        "stores": [dict(store) for store in model.stores],
    }


def correction_in_words(model: Any) -> list[str]:
    factors = model.factors
    what = f"between {factors.min():.4f} and {factors.max():.4f}" if factors.size else "none yet"
    return [
        f"kind      correction, {model.policy or 'not enabled'}; {model.retained:,} observations retained",
        f"factors   {what}",
        *inside("over", model.model),
    ]


def correction_contents(model: Any) -> dict[str, Any]:
    factors = model.factors
    return {
        "policy": model.policy,
        "retained_observations": model.retained,
        "ready_buckets": model.ready_buckets,
        "smallest_factor": float(factors.min()) if factors.size else None,
        "largest_factor": float(factors.max()) if factors.size else None,
        "over": contents(model.model),
    }


# Learned models


def learned_in_words(model: Any, lacks: Mapping[str, str] | None = None) -> list[str]:
    """lacks: by kind of work what its observations lack, where those are at hand."""
    forms = ", ".join(FORMS[family] for family in model.families)
    graphs = "" if model.graph_sizes is None else f", {len(model.graph_sizes)} CUDA graph sizes"
    lines = [
        f"kind      learned from {model.role} work: {forms}{graphs}",
        f"range     holds {level_in_words(model.level)} of what is like the observations",
    ]
    if not np.isfinite(model.anchor):
        lines.append("drafts    any draft length, also far beyond what was observed")
    for store in stores_of(model):
        kind, n = store["workload_kind"], store["observations"]
        if store["ready"]:
            calibrated = f"its range from {store['calibrated_on']:,} of them held out in turn"
            lines.append(f"store     {kind}: ready, {n:,} observations, {calibrated}")
            lines.append(f"box       {box_in_words(store['box'])}")
        else:
            why = (lacks or {}).get(kind) or f"{n:,} observations, which are too few or too much alike"
            lines.append(f"store     {kind}: not ready, {why}")
    return lines


def box_in_words(box: Mapping[str, tuple[float, float]]) -> str:
    """The axes on which something was observed; an axis without any of it is 1..1."""
    box = dict(box)
    if box["decode_rows"] == box["decode_requests"]:  # neither padded nor of several ranks
        del box["decode_rows"]
    told = {name: span for name, span in box.items() if span[1] > 1 or name == "decode_requests"}
    spans = {AXES[name]: (round(low), round(high)) for name, (low, high) in told.items()}
    return ", ".join(f"{name} {low:,}..{high:,}" for name, (low, high) in spans.items())


def stores_of(model: Any) -> list[dict[str, Any]]:
    return [dict(store) for store in model.diagnostics]


def learned_contents(model: Any) -> dict[str, Any]:
    return {
        "role": model.role,
        "families": list(model.families),
        "level": model.level,
        "cuda_graph_batch_sizes": None if model.graph_sizes is None else np.asarray(model.graph_sizes).tolist(),
        "allow_extrapolation": not np.isfinite(model.anchor),
        "stores": [
            store | {"box": {axis: list(span) for axis, span in store["box"].items()}} for store in stores_of(model)
        ],
    }


def forest_in_words(model: Any) -> list[str]:
    return [
        f"kind      learned trees of {model.role} work over {len(model.features)} features, fitted to {model.target}",
        f"features  {', '.join(model.features[:8])}{', ...' if len(model.features) > 8 else ''}",
        f"stores    {', '.join(model.kinds)}",
    ]


def forest_contents(model: Any) -> dict[str, Any]:
    return {
        "role": model.role,
        "target": model.target,
        "features": list(model.features),
        "stores": [{"workload_kind": kind, "ready": True} for kind in model.kinds],
    }


# Models around models


def choice_in_words(model: Any) -> list[str]:
    lines = ["kind      of two models the one that has lately been nearer, for each kind of work"]
    for row in model.diagnostics:
        if row["observations"]:
            errors = (f"{100 * row[f'{name}_error']:.2f} % {name}" for name in ("stable", "challenger"))
            told = f"the {row['active']} one answers, errors {', '.join(errors)}"
            lines.append(f"choice    {row['workload_kind']}: {told}, {row['observations']:,} observations")
    if len(lines) == 1:
        lines.append("choice    none yet, the stable one answers")
    return [*lines, *inside("stable", model.stable), *inside("other", model.challenger)]


def choice_contents(model: Any) -> dict[str, Any]:
    return {
        "choices": [dict(row) for row in model.diagnostics],
        "stable": contents(model.stable),
        "challenger": contents(model.challenger),
    }


def intervals_in_words(model: Any) -> list[str]:
    lines = [
        *in_words(model.model),
        f"range     holds {level_in_words(model.level)} of the table's own points, left out in turn",
    ]
    for row in model.diagnostics:
        width = row["half_width_pct"]
        shown = "none" if width is None else f"{width:.2f} %"
        lines.append(f"width     {row['phase']} {row['resolution']}: {shown}, from {row['residuals']:,} points")
    return lines


def intervals_contents(model: Any) -> dict[str, Any]:
    return {"level": model.level, "widths": [dict(row) for row in model.diagnostics], "over": contents(model.model)}


WORDS: dict[str, Callable[[Any], list[str]]] = {
    "Regression": regression_in_words,
    "Corrected": correction_in_words,
    "Learned": learned_in_words,
    "Forest": forest_in_words,
    "Chosen": choice_in_words,
    "WithIntervals": intervals_in_words,
}
CONTENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Regression": regression_contents,
    "Corrected": correction_contents,
    "Learned": learned_contents,
    "Forest": forest_contents,
    "Chosen": choice_contents,
    "WithIntervals": intervals_contents,
}
