"""What a model around another one says of itself: what the inner one says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fpmjax.status import Status
from fpmjax.work import Work


class Around:
    """Base of models that hold another one in `model` and change its answers, not what it answers."""

    model: Any

    @property
    def composition(self) -> str:
        return self.model.composition

    @property
    def execution(self) -> str:
        return self.model.execution

    @property
    def verify_width(self) -> int:
        return getattr(self.model, "verify_width", 1)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(getattr(self.model, "reads", ()))

    @property
    def by_rank(self) -> bool:
        return getattr(self.model, "by_rank", True)

    @property
    def ready(self) -> bool:
        """Whether the inner model is."""
        return self.model.ready

    @property
    def cell(self) -> Any:
        return getattr(self.model, "cell", None)

    @property
    def explain(self) -> Callable[[Status, Work], str]:
        return self.model.explain
