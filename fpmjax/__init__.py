"""fpmjax: how long one forward pass of an LLM serving engine takes, in bulk, from measurements.

The Rust estimator of aisimulate, whose answers the direct rule reproduces bit for bit, is called the peer throughout.
Public names load on first use, so that `import fpmjax` costs nothing before jax is needed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpmjax import plot as plot
    from fpmjax import study as study
    from fpmjax._jax import x64 as x64
    from fpmjax.acceptance import Acceptance as Acceptance
    from fpmjax.acceptance import BestDraft as BestDraft
    from fpmjax.acceptance import Payoff as Payoff
    from fpmjax.acceptance import best_draft_length as best_draft_length
    from fpmjax.acceptance import best_measured_draft_length as best_measured_draft_length
    from fpmjax.acceptance import pooled_tokens_per_round as pooled_tokens_per_round
    from fpmjax.answer import Estimate as Estimate
    from fpmjax.answer import Evidence as Evidence
    from fpmjax.answer import Interval as Interval
    from fpmjax.answer import Parts as Parts
    from fpmjax.answer import Resolution as Resolution
    from fpmjax.answer import SpeculativeEstimate as SpeculativeEstimate
    from fpmjax.answer import Support as Support
    from fpmjax.compare import compare as compare
    from fpmjax.compare import difference_summary as difference_summary
    from fpmjax.data import embedded_table as embedded_table
    from fpmjax.errors import CellNotFoundError as CellNotFoundError
    from fpmjax.errors import CoverageError as CoverageError
    from fpmjax.errors import DraftLengthTypeError as DraftLengthTypeError
    from fpmjax.errors import FpmError as FpmError
    from fpmjax.errors import MetricsError as MetricsError
    from fpmjax.errors import ModelFileError as ModelFileError
    from fpmjax.errors import OptionError as OptionError
    from fpmjax.errors import PerfDataNotAvailableError as PerfDataNotAvailableError
    from fpmjax.errors import SpeculationError as SpeculationError
    from fpmjax.errors import TableError as TableError
    from fpmjax.errors import TraceError as TraceError
    from fpmjax.estimate import estimate as estimate
    from fpmjax.evaluate import evaluate as evaluate
    from fpmjax.facade import ForwardPassPerfModel as ForwardPassPerfModel
    from fpmjax.grid import Grid as Grid
    from fpmjax.grid import grid as grid
    from fpmjax.inverse import Ended as Ended
    from fpmjax.inverse import Largest as Largest
    from fpmjax.inverse import largest_batch as largest_batch
    from fpmjax.inverse import largest_context as largest_context
    from fpmjax.models.anchors import Anchor as Anchor
    from fpmjax.models.anchors import recommend_anchors as recommend_anchors
    from fpmjax.models.chosen import Chosen as Chosen
    from fpmjax.models.chosen import chosen as chosen
    from fpmjax.models.corrected import Corrected as Corrected
    from fpmjax.models.corrected import corrected as corrected
    from fpmjax.models.direct import Direct as Direct
    from fpmjax.models.direct import direct as direct
    from fpmjax.models.forest import Forest as Forest
    from fpmjax.models.forest import load_forest as load_forest
    from fpmjax.models.intervals import WithIntervals as WithIntervals
    from fpmjax.models.intervals import with_intervals as with_intervals
    from fpmjax.models.learned import Learned as Learned
    from fpmjax.models.learned import learned as learned
    from fpmjax.models.learned import learned_fleet as learned_fleet
    from fpmjax.models.regression import Regression as Regression
    from fpmjax.models.regression import regression as regression
    from fpmjax.models.regression import stack as stack
    from fpmjax.models.regression import update_many as update_many
    from fpmjax.models.roofline import Hardware as Hardware
    from fpmjax.models.settings import ErrorThreshold as ErrorThreshold
    from fpmjax.models.settings import Knots as Knots
    from fpmjax.observe.observations import Observations as Observations
    from fpmjax.observe.trace import read_trace as read_trace
    from fpmjax.reduce import Reduce as Reduce
    from fpmjax.reduce import summarise as summarise
    from fpmjax.rule import RuleInterval as RuleInterval
    from fpmjax.rule import SpeculativeRule as SpeculativeRule
    from fpmjax.rule_file import load_rule as load_rule
    from fpmjax.rule_file import save_rule as save_rule
    from fpmjax.sensitivity import Sensitivity as Sensitivity
    from fpmjax.sensitivity import row_sensitivity as row_sensitivity
    from fpmjax.sensitivity import sensitivity as sensitivity
    from fpmjax.speculative import speculative as speculative
    from fpmjax.status import Status as Status
    from fpmjax.store import load_model as load_model
    from fpmjax.store import save_model as save_model
    from fpmjax.study.read import Study as Study
    from fpmjax.study.read import read_study as read_study
    from fpmjax.study.result import StudyResult as StudyResult
    from fpmjax.study.result import run_study as run_study
    from fpmjax.sweep import Swept as Swept
    from fpmjax.sweep import sweep as sweep
    from fpmjax.tables.cell import Cell as Cell
    from fpmjax.tables.identity import Identity as Identity
    from fpmjax.tables.load import Cells as Cells
    from fpmjax.tables.load import load_cells as load_cells
    from fpmjax.tables.write import write_table as write_table
    from fpmjax.work import RequestLists as RequestLists
    from fpmjax.work import Work as Work

__version__ = "0.1.0"

# In reading order: what was measured or observed, the model over it, what is asked, what comes back, what is kept, what
# can go wrong.
_HOME = {
    "embedded_table": "data",
    "load_cells": "tables.load",
    "write_table": "tables.write",
    "Cells": "tables.load",
    "Cell": "tables.cell",
    "Identity": "tables.identity",
    "read_trace": "observe.trace",
    "Observations": "observe.observations",
    "direct": "models.direct",
    "Direct": "models.direct",
    "regression": "models.regression",
    "Regression": "models.regression",
    "stack": "models.regression",
    "update_many": "models.regression",
    "ErrorThreshold": "models.settings",
    "Knots": "models.settings",
    "learned": "models.learned",
    "learned_fleet": "models.learned",
    "Learned": "models.learned",
    "Hardware": "models.roofline",
    "recommend_anchors": "models.anchors",
    "Anchor": "models.anchors",
    "load_forest": "models.forest",
    "Forest": "models.forest",
    "corrected": "models.corrected",
    "Corrected": "models.corrected",
    "chosen": "models.chosen",
    "Chosen": "models.chosen",
    "with_intervals": "models.intervals",
    "WithIntervals": "models.intervals",
    "Work": "work",
    "RequestLists": "work",
    "estimate": "estimate",
    "evaluate": "evaluate",
    "grid": "grid",
    "Grid": "grid",
    "sweep": "sweep",
    "Swept": "sweep",
    "Reduce": "reduce",
    "summarise": "reduce",
    "compare": "compare",
    "difference_summary": "compare",
    "largest_batch": "inverse",
    "largest_context": "inverse",
    "Largest": "inverse",
    "Ended": "inverse",
    "sensitivity": "sensitivity",
    "row_sensitivity": "sensitivity",
    "Sensitivity": "sensitivity",
    "speculative": "speculative",
    "SpeculativeRule": "rule",
    "RuleInterval": "rule",
    "Acceptance": "acceptance",
    "pooled_tokens_per_round": "acceptance",
    "best_draft_length": "acceptance",
    "best_measured_draft_length": "acceptance",
    "BestDraft": "acceptance",
    "read_study": "study.read",
    "Study": "study.read",
    "run_study": "study.result",
    "StudyResult": "study.result",
    "save_rule": "rule_file",
    "load_rule": "rule_file",
    "Payoff": "acceptance",
    "x64": "_jax",
    "Estimate": "answer",
    "SpeculativeEstimate": "answer",
    "Interval": "answer",
    "Support": "answer",
    "Parts": "answer",
    "Evidence": "answer",
    "Resolution": "answer",
    "Status": "status",
    "save_model": "store",
    "load_model": "store",
    "ForwardPassPerfModel": "facade",
    "FpmError": "errors",
    "TableError": "errors",
    "CellNotFoundError": "errors",
    "MetricsError": "errors",
    "TraceError": "errors",
    "OptionError": "errors",
    "ModelFileError": "errors",
    "CoverageError": "errors",
    "PerfDataNotAvailableError": "errors",
    "SpeculationError": "errors",
    "DraftLengthTypeError": "errors",
}
_MODULES = ("plot", "study")  # with names of their own
__all__ = [*_HOME, *_MODULES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fpmjax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fpmjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fpmjax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `fpmjax.estimate` the function: an import of the submodule of that name would bind the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
