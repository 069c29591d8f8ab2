"""How a study's document is read by what shows it: the report, the charts and the command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

POOLED = "pooled"
MAIN = ("rel_l2", "round")  # the refit that is drawn, and that a rule file is written of


def number(value: float | None, digits: int = 2) -> str:
    """A percentage or a ratio for people, small ones not as zero; `-` where there is none."""
    if value is None:
        return "-"
    tiny = 1e-6 <= abs(value) < 0.5 * 10.0**-digits
    return f"{value:.2g}" if tiny else f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


def signed(value: float | None) -> str:
    return "-" if value is None else ("" if value < 0 else "+") + number(value)


def span(ends: Sequence[float], digits: int = 2) -> str:
    """An interval, with as many more digits as its two ends need to differ; but for rounding they do."""
    low, high = ends
    texts = [number(x, digits) for x in ends]
    if texts[0] == texts[1] and high - low > 1e-6 * max(abs(low), abs(high)):
        digits = 1 - math.floor(math.log10(high - low))  # two of the difference
        texts = [f"{x:.{max(digits, 0)}f}" for x in ends]
    return "..".join(texts)


def formula(rule: dict[str, Any]) -> str:
    """`0.08 d + 1.25`"""
    slope, intercept = (float(rule[name]) for name in ("slope", "intercept"))
    return f"{slope:.4g} d + {intercept:.4g}"


def line_of(rule: dict[str, Any] | None) -> Callable[[float], float] | None:
    """The ratio by draft length; None where nothing was fitted."""
    if rule is None or rule.get("slope") is None:
        return None
    slope, intercept = float(rule["slope"]), float(rule["intercept"])
    return lambda d: slope * d + intercept


def refit_of(document: dict[str, Any], group: str = POOLED, loss: str = MAIN[0], weights: str = MAIN[1]) -> Any:
    """One refit of the document; None where there is none of that kind."""
    wanted = (group, loss, weights)
    return next((fit for fit in document["refits"] if (fit["group"], fit["loss"], fit["weights"]) == wanted), None)


def pooled(document: dict[str, Any]) -> dict[str, Any] | None:
    """The relative least-squares fit over all rounds alike."""
    return refit_of(document)


def group_name(row: dict[str, Any]) -> str:
    """`Qwen3-8B + eagle3`: a method is never named alone, for its model may be what matters."""
    return f"{row['model']} + {row['method']}"


def config_name(row: dict[str, Any]) -> str:
    """One configuration in a line."""
    context = row["initial_context"]
    return (
        f"{row['gpu']}, TP{row['tp']}, {group_name(row)}, d = {row['draft_length']}, B = {row['batch_size']}, "
        f"context {'unknown' if context < 0 else f'{context:,}'}"
    )


def error_interval(cell: dict[str, Any]) -> tuple[float, float] | None:
    """That of a cell's round-weighted MAPE, in percent."""
    found = cell.get("cell_round_weighted_mape_interval")
    return None if found is None else (found[0], found[1])


def sizes_pooled(document: dict[str, Any], gpu: str | None = None) -> str:
    """`TP1, TP4 pooled` where the cells of a GPU, or of any, hold several tensor-parallel sizes; nothing elsewhere."""
    pools = [cell.get("tensor_parallel_sizes", ()) for cell in document["cells"] if gpu in (None, cell["gpu"])]
    sizes = sorted({tp for pool in pools if len(pool) > 1 for tp in pool})
    return ", ".join(f"TP{tp}" for tp in sizes) + " pooled" if sizes else ""


def drawable(value: float | None) -> bool:
    """Whether a chart has a place for it: implausible latencies make errors that are null, or that dwarf all others."""
    return value is not None and abs(value) < FAR


FAR = 1e100


def residuals(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Rows of `widened_batch` or `kv_tokens` that can be drawn."""
    names = [f"{name}_round_error" for name in ("p10", "median", "p90")]
    return [row for row in document["residuals"][key] if all(drawable(row[name]) for name in names)]


def nothing_drawn(document: dict[str, Any]) -> str:
    """What an empty chart says."""
    return "no error has a place on a scale" if document["overall"]["rounds"] else "no round was scored"


def panel_name(document: dict[str, Any], gpu: str) -> str:
    """A GPU, and the tensor-parallel sizes that its cells pool."""
    pooled_sizes = sizes_pooled(document, gpu)
    return f"{gpu}: {pooled_sizes}" if pooled_sizes else gpu


def headline(document: dict[str, Any]) -> str:
    """How many rounds and configurations, the timing scope and the reference: what a chart's title carries."""
    overall, scope = document["overall"], document["scope"]
    reference = document["reference"]["mode"] + (", anchors only" if document["reference"]["anchors_only"] else "")
    return (
        f"{overall['rounds']:,} rounds in {overall['scored_configurations']:,} configurations; timing scope "
        f"{', '.join(scope['timing_scope'])}; reference {reference}"
    )
