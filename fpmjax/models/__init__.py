"""One file per kind of model; each is a frozen pytree that is called with work.

`Model` is all that the rest of the package asks of one.  What is optional is looked up where it is used.
"""

from __future__ import annotations

from typing import Any, Protocol

from fpmjax.answer import Estimate
from fpmjax.status import Status
from fpmjax.work import Work


class Model(Protocol):
    """What `estimate`, `speculative` and the facade need.

    composition: `"whole_forward"` where one answer is a whole pass; nothing else carries a draft length.
    execution: `"autoregressive"`, or `"speculative_round"` where an answer already is a whole round.
    ready: whether the model answers anything at all.
    """

    composition: str
    execution: str
    ready: bool

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure jax under `fpmjax.x64()`: NaN and a status where there is no answer, never an exception for a value."""
        ...


class Extras(Protocol):
    """What a model may add.

    verify_width: decode rows per request that it adds itself (absent: 1).
    reads: which of `"variance"` and `"lists"` it reads beside the counts (absent: neither).
    cell: the measured cell behind it (absent or None: not made from one).
    for_draft: the model that answers widened work, where readiness is judged on other terms (absent: itself).
    """

    verify_width: int
    reads: frozenset[str]
    cell: Any
    for_draft: Any

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries, in NumPy and plain numbers: the same bits and no compile."""
        ...

    def explain(self, reason: Status, work: Work) -> str:
        """Why one iteration (fields [r]) has no answer, what is measured nearby, and a `hint:` line."""
        ...
