"""The few places where fpmjax meets jax itself: 64-bit scope, pytree registration, version differences."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast, dataclass_transform

import jax

from fpmjax.errors import FpmError

T = TypeVar("T")


def x64() -> AbstractContextManager:
    """Scope in which jax keeps 64 bits: tables and answers are float64, counts exceed 2**31.

    `estimate` and the command open it themselves; open it around your own `jit`, `vmap` or `grad` of a
    model.  The process-wide setting stays as the caller left it.
    """
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return importlib.import_module("jax.experimental").enable_x64()  # jax 0.4.x


@contextmanager
def own_scope() -> Iterator[None]:
    """`x64`, without the caller's debugging modes: NaN is an answer here, and the transfers are ours."""
    with x64(), jax.debug_nans(False), jax.transfer_guard("allow"):
        yield


def require_x64() -> None:
    """Raise at trace time where float64 would silently become float32."""
    if not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise FpmError(
            "fpmjax models are float64, but jax is in 32-bit mode here\n"
            "hint: wrap the call in `with fpmjax.x64():`, or use `fpmjax.estimate`, which does it for you",
            code="x64_required",
        )


@dataclass_transform(frozen_default=True)
def pytree(*static: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass registered as a pytree; the fields named `static` are metadata."""

    def register(cls: type[T]) -> type[T]:
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        names = [f.name for f in dataclasses.fields(cast(Any, cls))]
        return jax.tree_util.register_dataclass(cls, [n for n in names if n not in static], list(static))

    return register
