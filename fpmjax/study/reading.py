"""How a study's document is read by what shows it: the report, the charts and the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

POOLED = "pooled"
MAIN = ("rel_l2", "round")  # the refit that is drawn, and that a rule file is written of


def number(value: float | None, digits: int = 2) -> str:
    """A percentage or a ratio for people; `-` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


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


def headline(document: dict[str, Any]) -> str:
    """How many rounds and configurations, the timing scope and the reference: what a chart's title carries."""
    overall, scope = document["overall"], document["scope"]
    reference = document["reference"]["mode"] + (", anchors only" if document["reference"]["anchors_only"] else "")
    return (
        f"{overall['rounds']:,} rounds in {overall['scored_configurations']:,} configurations; timing scope "
        f"{', '.join(scope['timing_scope'])}; reference {reference}"
    )
