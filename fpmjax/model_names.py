"""Who is asked: one model, several in a list, or {name: model}; and a name for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fpmjax.errors import refuse_option
from fpmjax.grid import Grid
from fpmjax.guard import check_concrete, check_one_model, is_model


def named(models: Any, queries: Any, who: str) -> tuple[list[str], tuple[Any, ...], bool]:
    """(names, models, whether rows say which model they are of); who: what asks them.

    Models come from the grid's own axis where it has one.  A list of one is that one; {name: model} keeps its name.

    Raises OptionError (`models`) for what holds no models, or two of one name, FpmError (`stacked`, `traced`).
    """
    own = queries.models if isinstance(queries, Grid) else None
    names: list[str] = []
    if own is not None:
        if models is not None:
            what = "the grid has an axis of models, and models are given beside it"
            refuse_option("models", what, "give models=None")
        asked = own
    elif isinstance(models, Mapping):
        names = [str(name).encode(errors="backslashreplace").decode() for name in models]  # Arrow holds UTF-8
        asked = tuple(models.values())
    elif isinstance(models, Sequence) and not isinstance(models, str) and not is_model(models):
        asked = tuple(models)
    else:
        asked = (models,)
    if not asked or not all(map(is_model, asked)):
        bare = not isinstance(models, (list, tuple, Mapping))
        shown = type(models).__name__ if bare else "no list of models"
        refuse_option("models", f"models is {shown}", "give fpmjax.direct(cell), a list of models, or {name: model}")
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        refuse_option("models", f"two models are named {twice}", "names are told apart as text")
    for model in asked:
        check_one_model(model, who)
        check_concrete(model, who, "inside jit call model(work)")
    several = own is not None or isinstance(models, Mapping) or len(asked) > 1
    return names or names_of(asked), asked, several


def names_of(models: Sequence[Any]) -> list[str]:
    """A name for each: what tells the cells apart, where that is enough, or the position."""
    return told_apart(models) or [f"model {i}" for i in range(len(models))]


def told_apart(models: Sequence[Any]) -> list[str] | None:
    """What tells the cells of these models apart, such as `tp=1`; None where some have none, or are of equal ones."""
    cells = [getattr(model, "cell", None) for model in models]
    identities = [dict(cell.identity) for cell in cells if cell is not None]
    if len(identities) < len(models):
        return None
    apart = [name for name in identities[0] if len({str(x[name]) for x in identities}) > 1]
    names = [" ".join(f"{name}={x[name]}" for name in apart) for x in identities]
    return names if len(set(names)) == len(names) and all(names) else None
