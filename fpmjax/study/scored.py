"""The speculative rounds of a study beside what an ordinary pass of their width takes: what statistics and fits see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule


class Config(NamedTuple):
    """One configuration, the unit of every equal-weight mean and of the resampling; ordered as a tuple is."""

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
        columns = ("depth", "reference_ms", "measured_ms", "config", "kv", "repetition", "round_index")
        return replace(self, **{name: getattr(self, name)[mask] for name in columns})
