"""What the published errors of the fixed rule can show: `python calibration/published_depth_study/rebuild.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from calibration.common import Result, command, number, read_rows, result_of, study_page, table  # noqa: E402
from calibration.panel import LOOKS, Panel, drawing, legend, steps  # noqa: E402

QUESTION = "What do the published errors of the fixed rule add up to, and what can they show?"
LARGE = 10  # percent
HALF = 0.005  # a printed percentage stands for this much on either side
GPUS, METHODS, DEPTHS = ("H100", "H200", "B200", "GB200"), ("mtp", "eagle3"), ("1", "2", "3", "4")
BATCHES, CONTEXTS = (1, 4, 8), (1024, 4096)
WORDS = {"mtp": "Qwen3.5-4B + MTP", "eagle3": "Qwen3-8B + EAGLE3"}


def measure() -> Result:
    data = HERE / "data"
    cells = read_rows(data / "cells.csv")
    value = {(c["gpu"], c["method"], c["draft_length"]): float(c["mape_percent"]) for c in cells}
    if set(value) != set(itertools.product(GPUS, METHODS, DEPTHS)) or len(cells) != len(value):
        raise SystemExit("cells.csv does not hold one cell of every GPU, method and draft length")
    totals = {row["name"]: float(row["value"]) for row in read_rows(data / "totals.csv")}

    def mean(which: Callable[[str, str, str], bool]) -> float:
        return fmean(v for key, v in value.items() if which(*key))

    plain = fmean(value.values())
    by_method = {m: mean(lambda _g, method, _d: method == m) for m in METHODS}  # noqa: B023
    pairs = list(itertools.product(GPUS, DEPTHS))
    largest = max(value, key=lambda key: value[key])
    # The share of EAGLE3 at which cells that differ by method alone add up to a published total.
    shares = {
        name: 100 * (totals[name] - by_method["mtp"]) / (by_method["eagle3"] - by_method["mtp"])
        for name in ("round_weighted_mape", "equal_config_mape")
    }
    numbers = {
        "design": {"gpus": GPUS, "methods": WORDS, "draft_lengths": DEPTHS, "batches": BATCHES, "contexts": CONTEXTS},
        "published": totals,
        "cells": [{"gpu": g, "method": m, "draft_length": int(d), "mape": v} for (g, m, d), v in value.items()],
        "cell_count": len(value),
        "configurations_per_cell": totals["configurations"] / len(value),
        "rounds_per_configuration": totals["validation_rounds"] / totals["configurations"],
        "plain_mean_of_cells": plain,
        "plain_mean_range": [plain - HALF, plain + HALF],
        "by_method": by_method,
        "by_depth": {f"d{d}": mean(lambda _g, _m, depth: depth == d) for d in DEPTHS},  # noqa: B023
        "by_gpu": {g: mean(lambda gpu, _m, _d: gpu == g) for g in GPUS},  # noqa: B023
        "by_method_and_depth": {
            m: {f"d{d}": mean(lambda _g, *key: key == (m, d)) for d in DEPTHS}  # noqa: B023
            for m in METHODS
        },
        "by_gpu_and_method": {
            g: {m: mean(lambda *key: key[:2] == (g, m)) for m in METHODS}  # noqa: B023
            for g in GPUS
        },
        "eagle3_over_mtp": by_method["eagle3"] / by_method["mtp"],
        "pairs": len(pairs),
        "pairs_where_eagle3_is_worse": sum(value[g, "eagle3", d] > value[g, "mtp", d] for g, d in pairs),
        "cells_above": {"percent": LARGE, "cells": sum(v > LARGE for v in value.values())},
        "largest_cell": {
            "gpu": largest[0],
            "method": WORDS[largest[1]],
            "draft_length": int(largest[2]),
            "mape": value[largest],
        },
        "eagle3_weight_percent_for": shares,
    }
    return result_of(HERE, QUESTION, data.glob("*.csv"), numbers, answer)


def answer(r: Result) -> str:
    low, high = r["plain_mean_range"]
    equal = r["published"]["equal_config_mape"]
    fits = low <= equal + HALF and equal - HALF <= high
    return f"""The {r["cell_count"]} published cells average {number(r["plain_mean_of_cells"], 3)} % (MTP
        {number(r["by_method"]["mtp"], 3)}, EAGLE3 {number(r["by_method"]["eagle3"], 3)}), which
        {"is" if fits else "is not"} the {equal} % quoted as the mean over equal configurations: the cells are weighted
        in some other way, most likely by rounds. They show how the size of the error goes with method, depth and GPU,
        and nothing about its sign, spread or interval."""


def readme(r: Result) -> str:
    cell = {(c["gpu"], c["method"], c["draft_length"]): c["mape"] for c in r["cells"]}
    quoted, both = r["published"], r["by_method_and_depth"]
    rows = [
        (g, WORDS[m], *(cell[g, m, int(d)] for d in DEPTHS), r["by_gpu_and_method"][g][m])
        for g in GPUS
        for m in METHODS
    ]
    means = [
        ("all", r["plain_mean_of_cells"]),
        *((WORDS[m], r["by_method"][m]) for m in METHODS),
        *((f"d = {d}", r["by_depth"][f"d{d}"]) for d in DEPTHS),
        *((g, r["by_gpu"][g]) for g in GPUS),
        *((f"{WORDS[m]}, d = {d}", both[m][f"d{d}"]) for m in METHODS for d in DEPTHS),
    ]
    design = r["design"]
    return study_page(
        HERE,
        r,
        gpus=", ".join(design["gpus"]),
        pairs=" and ".join(design["methods"].values()),
        depths=" to ".join((design["draft_lengths"][0], design["draft_lengths"][-1])),
        batches=", ".join(map(number, design["batches"])),
        contexts=" and ".join(map(number, design["contexts"])),
        cells=table(("GPU", "model and method", *(f"d = {d}" for d in DEPTHS), "mean"), rows),
        means=table(("over", "mean, %"), [(words, number(value, 3)) for words, value in means]),
        totals=table(
            ("total", "published, %"),
            [
                ("round-weighted MAPE", quoted["round_weighted_mape"]),
                ("equal-configuration MAPE", quoted["equal_config_mape"]),
                ("90th percentile (of rounds or of configurations is not said)", quoted["p90_unnamed"]),
                ("worst configuration", quoted["worst_config_mape"]),
            ],
        ),
    )


def chart(r: Result) -> str:
    looks, mean = dict(zip(METHODS, LOOKS, strict=False)), LOOKS[4]
    cell = {(c["gpu"], c["method"], c["draft_length"]): c["mape"] for c in r["cells"]}
    parts: list[str] = []
    for i, gpu in enumerate(GPUS):
        panel = Panel(60 + 205 * i, 66, 180, 230, (0.4, 4.6), (0.0, 20.0))
        panel.axes(gpu, steps(1, 4, 1), steps(0, 20, 5), "draft length d", "" if i else "MAPE, %")
        for j, method in enumerate(METHODS):
            for d in DEPTHS:
                panel.bar(float(d) + 0.4 * (j - 0.5), 0.36, cell[gpu, method, int(d)], looks[method])
        panel.across(r["plain_mean_of_cells"], mean)
        parts += panel.parts
    entries = [(looks[m], "bar", f"{WORDS[m]}: mean {number(r['by_method'][m], 3)} %") for m in METHODS]
    entries.append((mean, "line", f"plain mean of all cells, {number(r['plain_mean_of_cells'], 3)} %"))
    words = "Bars: published mean absolute percentage error of the rule 0.08 d + 1.25 per GPU, method and draft length."
    title = "Published error of the fixed rule, by draft length"
    return drawing(880, 410, title, words, [*parts, *legend(60, 358, entries)])


if __name__ == "__main__":
    command(HERE, measure, readme, chart)
