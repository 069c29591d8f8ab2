"""The speculative rounds of a study beside what an ordinary pass of their width takes: what statistics and fits see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.metrics import as_index, show
from fpmjax.study.columns import CONFIGURATION, WARMUP

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule
    from fpmjax.study.read import Study
    from fpmjax.study.reference import Curves


class Config(NamedTuple):
    """One configuration, the unit of every equal-weight mean and of the resampling; ordered as a tuple is.

    initial_context is -1 where an anchor table does not say.
    """

    gpu: str
    tp: int
    model: str
    method: str
    draft_length: int
    batch_size: int
    initial_context: int

    @property
    def group(self) -> tuple[str, str, str]:
        """(gpu, model, method)"""
        return self.gpu, self.model, self.method

    @property
    def cell(self) -> tuple[str, str, str, int]:
        """(gpu, model, method, draft_length)"""
        return *self.group, self.draft_length


@dataclass(frozen=True, eq=False)
class Scored:
    """The rounds that have a reference, n of them, in the order of configuration, study, repetition and round.

    That order does not depend on the order of the file's rows, so sums over the rounds do not either.
    """

    depth: np.ndarray
    """int64 [n], draft tokens proposed per round, the bonus token not counted."""
    reference_ms: np.ndarray
    """float64 [n], F((d+1)B, K): what an ordinary pass of the widened batch takes."""
    measured_ms: np.ndarray
    """float64 [n], T: what the round took."""
    config: np.ndarray
    """int32 [n], index into `configs`, ascending."""
    kv: np.ndarray
    """int64 [n], past KV tokens of the whole batch; -1 where an anchor table does not say."""
    repetition: np.ndarray
    """int32 [n]"""
    round_index: np.ndarray
    """int64 [n]"""
    configs: tuple[Config, ...]
    """Sorted; also those without a scored round."""
    unmatched: np.ndarray
    """int64 [configs], rounds without a reference."""
    excluded: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Reason -> int64 [configs], rounds left out before any reference was looked for."""
    reference: str = "measured"
    """Where `reference_ms` comes from: `measured`, `interpolated_batch` (anchors only: no fit data) or `estimator`."""
    row: np.ndarray | None = None
    """int64 [n], the study's row of each round; None where the rounds come from no study."""
    missing: tuple[Mapping[str, Any], ...] = ()
    """The unmatched rounds, one entry for each configuration that has any."""

    def __len__(self) -> int:
        return len(self.depth)

    @property
    def anchors_only(self) -> bool:
        """Whether the reference is interpolated between batches, which supports no fit."""
        return self.reference == "interpolated_batch"

    @cached_property
    def count(self) -> np.ndarray:
        """int64 [configs], scored rounds of each configuration."""
        return np.bincount(self.config, minlength=len(self.configs)).astype(np.int64)

    @cached_property
    def group_keys(self) -> tuple[tuple[str, str, str], ...]:
        """Every (gpu, model, method), sorted."""
        return tuple(sorted({config.group for config in self.configs}))

    @cached_property
    def groups(self) -> np.ndarray:
        """int64 [configs], index into `group_keys`."""
        place = {key: i for i, key in enumerate(self.group_keys)}
        return np.array([place[config.group] for config in self.configs], np.int64)

    @cached_property
    def cell_keys(self) -> tuple[tuple[str, str, str, int], ...]:
        """Every (gpu, model, method, draft_length), sorted."""
        return tuple(sorted({config.cell for config in self.configs}))

    @cached_property
    def cells(self) -> np.ndarray:
        """int64 [configs], index into `cell_keys`."""
        place = {key: i for i, key in enumerate(self.cell_keys)}
        return np.array([place[config.cell] for config in self.configs], np.int64)

    @cached_property
    def widened(self) -> np.ndarray:
        """int64 [n], (d+1)B: the batch at which the reference was looked up."""
        wide = np.array([(c.draft_length + 1) * c.batch_size for c in self.configs], np.int64)
        return wide[self.config]

    def predict(self, rule: SpeculativeRule) -> np.ndarray:
        """float64 [n], the milliseconds that a rule gives each round."""
        return rule.factor(self.depth) * self.reference_ms

    def where(self, mask: np.ndarray) -> Scored:
        """The rounds of a boolean mask [n].  Configurations keep their index, their unmatched and excluded counts."""
        columns = ("depth", "reference_ms", "measured_ms", "config", "kv", "repetition", "round_index", "row")
        found = {name: getattr(self, name) for name in columns}
        return replace(self, **{name: values if values is None else values[mask] for name, values in found.items()})


def score(
    study: Study,
    *,
    reference: str = "measured",
    model: Any = None,
    repetition: int | None = 1,
    warmup: int = WARMUP,
) -> Scored:
    """The speculative rounds of one repetition beside their reference.

    reference, model: see `fpmjax.study.reference`.
    repetition: of the speculative rounds; None for all of them.  The reference is always of repetition 0.
    warmup: rounds left out at the start of every run, ordinary ones too.

    Raises OptionError: `study` for what is none, `repetition`, `study_empty` (no speculative round of that repetition),
    and those of `exclude` and of `reference_of`.
    """
    from fpmjax.study.exclude import exclude
    from fpmjax.study.read import Study
    from fpmjax.study.reference import curves_of, reference_of
    from fpmjax.study.rules import coded

    if not isinstance(study, Study):
        refuse_option("study", f"no study, but {show(study)}", "fpmjax.read_study makes one of a file or of a table")
    if repetition is not None and ((number := as_index(repetition)) is None or number < 0):
        refuse_option("repetition", f"repetition is {show(repetition)}", "one number from 0, or None for all")
    c = study.columns
    left_out = exclude(study, warmup=warmup)
    curves = None if reference == "estimator" else curves_of(study, left_out.kept)
    ms = reference_of(study, left_out.kept, mode=reference, model=model, curves=curves)
    asked = study.sd if repetition is None else study.sd & (c["repetition"] == repetition)
    if not asked.any():
        there = sorted(set(c["repetition"][study.sd].tolist()))
        what = "speculative rounds" if repetition is None else f"speculative rounds of repetition {repetition}"
        hint = f"pass repetition={there[0]}, or None for all" if there else "rows of kind sd are what is scored"
        refuse_option("study_empty", f"{study.label} has no {what}", hint)
    rows = np.flatnonzero(asked)
    keys = ("study_id", "framework", "framework_version", "dtype", "repetition", "round_index")
    rows = rows[np.lexsort([c[name][rows] for name in reversed(CONFIGURATION + keys)])]
    _, first, config = np.unique(
        coded([c[name][rows] for name in CONFIGURATION]), return_index=True, return_inverse=True
    )
    values = [study.text(name)[rows[first]] if name in study.words else c[name][rows[first]] for name in CONFIGURATION]
    configs = tuple(Config(*row) for row in zip(*(column.tolist() for column in values), strict=True))
    code = left_out.code[rows]
    matched = ~np.isnan(ms[rows])
    excluded = {
        reason: np.bincount(config[code == i], minlength=len(configs)).astype(np.int64)
        for i, reason in enumerate(left_out.reasons, 1)
        if (code == i).any()
    }
    lost, scored = (code == 0) & ~matched, (code == 0) & matched
    unmatched = np.bincount(config[lost], minlength=len(configs)).astype(np.int64)
    missing = _missing(study, rows[lost], config[lost], configs, curves)
    config, rows = config[scored].astype(np.int32), rows[scored]
    return Scored(
        depth=c["draft_length"][rows],
        reference_ms=ms[rows],
        measured_ms=c["latency_ms"][rows],
        config=config,
        kv=c["total_kv_tokens"][rows],
        repetition=c["repetition"][rows].astype(np.int32),
        round_index=c["round_index"][rows],
        configs=configs,
        unmatched=unmatched,
        excluded=excluded,
        reference=reference,
        row=rows,
        missing=missing,
    )


def _missing(
    study: Study, rows: np.ndarray, config: np.ndarray, configs: tuple[Config, ...], curves: Curves | None
) -> tuple[dict[str, Any], ...]:
    """One entry per configuration with unmatched rounds: what was looked up, and what was measured at that batch.

    `measured_kv` is None where the batch was not measured, or where the reference is a model.
    """
    from fpmjax.study.reference import engines

    kv, code = study.columns["total_kv_tokens"], engines(study)
    entries = []
    for i in np.unique(config).tolist():
        here = rows[config == i]
        batch = (configs[i].draft_length + 1) * configs[i].batch_size
        curve = -1
        if curves is not None:
            low, high = curves.find(code[here[:1]], np.array([batch]))
            curve = int(low[0]) if low[0] == high[0] else -1
        entries.append(
            {
                **configs[i]._asdict(),
                "unmatched": len(here),
                "widened_batch": batch,
                "kv": [int(kv[here].min()), int(kv[here].max())],
                "measured_kv": list(curves.bounds(curve)) if curves is not None and curve >= 0 else None,
            }
        )
    return tuple(entries)
