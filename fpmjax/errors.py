"""Everything that fpmjax raises for a user's mistake or for a question without an answer.

Each error carries `.code`, a short stable word for programs, beside its message for people.

    FpmError
    ├── TableError            (ValueError)    a table file, its sidecar or a row is not acceptable
    ├── CellNotFoundError     (LookupError)   no cell, or several cells, match what was selected
    ├── MetricsError          (ValueError)    the work or the metrics are malformed
    ├── TraceError            (ValueError)    a file of observations is not acceptable
    ├── OptionError           (ValueError)    an option or a configuration is not one that a model can be built with
    ├── ModelFileError        (ValueError)    a saved model is not acceptable
    ├── CoverageError         (RuntimeError)  the measurements have no answer here
    └── SpeculationError      (ValueError)    the question cannot carry a draft length
        └── DraftLengthTypeError (TypeError)  the draft length is not an integer
"""

from __future__ import annotations

from typing import NoReturn


class FpmError(Exception):
    """Base of every error of this package; `code` names the kind, `default_code` where none is given."""

    default_code = "error"

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        self.code = code or self.default_code


class TableError(FpmError, ValueError):
    """A table artifact is refused: file, sidecar, digest, column, row or identity."""

    default_code = "table"


class CellNotFoundError(FpmError, LookupError):
    """No cell matches what was selected, or more than one does."""

    default_code = "cell_not_found"


class MetricsError(FpmError, ValueError):
    """Work or forward-pass metrics that no engine could have meant."""

    default_code = "metrics"


class TraceError(FpmError, ValueError):
    """An engine trace, a benchmark artifact or a table of observations is refused: file, line, column or meaning."""

    default_code = "trace"


class OptionError(FpmError, ValueError):
    """An option, or the whole configuration, is not one that a model can be built with."""

    default_code = "option"


class ModelFileError(FpmError, ValueError):
    """A saved model cannot be loaded, or a model cannot be saved."""

    default_code = "model_file"


class CoverageError(FpmError, RuntimeError):
    """The model has no measurement that supports an answer; nothing is extrapolated."""

    default_code = "out_of_coverage"


PerfDataNotAvailableError = CoverageError


class SpeculationError(FpmError, ValueError):
    """A draft length does not go with this work, this model or this count."""

    default_code = "speculation"


class DraftLengthTypeError(SpeculationError, TypeError):
    """The draft length is not an integer: a boolean, a float, text or the like."""

    default_code = "draft_length_type"


def first_line(error: BaseException, longest: int | None = 200) -> str:
    """What a foreign error says, for a message of our own: its first line, or its type where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0][:longest]


def refuse_option(code: str, what: str, hint: str) -> NoReturn:
    """Raise OptionError with its hint line."""
    raise OptionError(f"{what}\nhint: {hint}", code=code)
