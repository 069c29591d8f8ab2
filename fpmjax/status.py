"""What became of one query: a small integer per query, each with its sentence and its error.

Device code never raises: it returns a `Status` beside NaN.  The host turns a refusal into the exception
named here only where the caller asked for it (`estimate(check=True)`, the facade, the command).
"""

from __future__ import annotations

from enum import IntEnum

from fpmjax.errors import CoverageError, FpmError, MetricsError, SpeculationError


class Status(IntEnum):
    """Outcome of a query; `OK` and `IDLE` carry a number, every other member is a refusal."""

    code: str
    sentence: str
    error: type[FpmError]

    def __new__(cls, value: int, code: str, sentence: str, error: type[FpmError] = FpmError):
        member = int.__new__(cls, value)
        member._value_ = value
        member.code, member.sentence, member.error = code, sentence, error
        return member

    OK = 0, "ok", "answered from measurements"
    IDLE = 1, "idle", "no rank has work, so the pass takes 0 ms"
    NO_BATCH_BRACKET = (
        2,
        "decode_no_two_sided_batch_bracket",
        "no measured batch sizes on both sides, in one capture regime and within two octaves, cover this KV total",
        CoverageError,
    )
    NO_PREFILL_SUPPORT = (
        3,
        "prefill_no_two_sided_support",
        "no measured points of this batch size lie on both sides of the query",
        CoverageError,
    )
    NO_ROWS = 4, "no_rows", "the table holds no rows of this phase", CoverageError
    NOT_READY = 5, "not_ready", "the model has not seen enough observations of this kind of work", CoverageError
    NOT_PURE_DECODE = (
        6,
        "not_pure_decode",
        "a draft length needs pure decode work on every rank, but prefill work is scheduled",
        SpeculationError,
    )
    NOT_SINGLE_TOKEN = (
        7,
        "not_single_token_decode",
        "a decode row already extends by more than one token, so it cannot be widened again",
        SpeculationError,
    )
    COUNT_OVERFLOW = (
        8,
        "count_overflow",
        "the widened request count does not fit in 32 bits",
        SpeculationError,
    )
    BAD_DRAFT_LENGTH = (
        9,
        "draft_length_not_positive",
        "a draft length is an integer from 1 to 4294967294; omit it for ordinary decoding",
        SpeculationError,
    )
    INVALID_WORK = (
        10,
        "invalid_work",
        "the work cannot be asked: totals without requests, counts outside 0..4294967295, or measured rounds composed",
        MetricsError,
    )

    @property
    def answered(self) -> bool:
        """Whether a number stands beside this status."""
        return self <= Status.IDLE
