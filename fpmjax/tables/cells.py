"""The cells of one table, by identity, with a `select` that explains itself."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from fpmjax.errors import CellNotFoundError
from fpmjax.tables.cell import Cell
from fpmjax.tables.identity import FIELDS, Identity, no_such_field, same, shorten

NEAREST = 3  # candidates named when nothing matches
LISTED = 8  # cells named when several match


@dataclass(frozen=True, eq=False, repr=False)
class Cells(Mapping[Identity, Cell]):
    """Read-only mapping from `Identity` to `Cell`, in the order of the file."""

    _cells: Mapping[Identity, Cell]
    policy: str
    """The measurement policy of the whole table."""
    digest: str
    """SHA-256 of the Parquet file, lower-case hex."""
    path: str
    """The Parquet file."""
    sidecar: Mapping[str, Any]
    """The sidecar's fields, provenance included; read-only."""
    warnings: tuple[str, ...] = ()
    """What was accepted but is worth knowing, one sentence each."""

    def __getitem__(self, identity: Identity) -> Cell:
        if identity not in self:
            if not isinstance(identity, Identity):
                raise CellNotFoundError(f"{shorten(identity)} is no Identity\nhint: use select(tp=..., ...) instead")
            raise self._nothing(dict(identity))
        return self._cells[identity]

    def __contains__(self, identity: object) -> bool:
        return isinstance(identity, Identity) and identity in self._cells

    def get(self, identity: Any, default: Any = None) -> Any:
        """The cell of an identity, or `default`."""
        return self._cells[identity] if identity in self else default

    def __iter__(self) -> Iterator[Identity]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"sidecar": dict(self.sidecar)}  # a read-only view cannot be copied or pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"sidecar": MappingProxyType(state["sidecar"])})

    def __repr__(self) -> str:
        return f"<Cells {self.path}: {len(self)} cells, {self.policy}>"

    def select(self, **fields: Any) -> Cell:
        """The one cell whose identity equals `fields` exactly; fields that are not given are free.

        Raises `CellNotFoundError`: `unknown_field` for a name that no identity has, `cell_not_found` with the
        nearest cells and what differs, `cell_ambiguous` with the cells that match and the fields that tell
        them apart.
        """
        for name in fields:
            if name not in FIELDS:
                raise CellNotFoundError(no_such_field(name), code="unknown_field")
        wanted = {name: _plain(value) for name, value in fields.items()}
        matches = [cell for identity, cell in self._cells.items() if not identity.differences(wanted)]
        if not matches:
            raise self._nothing(wanted)
        if len(matches) > 1:
            raise self._several(wanted, [cell.identity for cell in matches])
        return matches[0]

    def _nothing(self, wanted: dict[str, Any]) -> CellNotFoundError:
        ranked = sorted((identity.differences(wanted) for identity in self._cells), key=len)
        lines = [
            "  " + ", ".join(f"{name}={shorten(value)} instead of {shorten(wanted[name])}" for name, value in d.items())
            for d in ranked[:NEAREST]
        ]
        count = f"the nearest {len(lines)} of {len(self)} cells have" if len(self) > 1 else "the only cell has"
        message = f"No FPM cell matches in {self.path}; {count}\n" + "\n".join(lines)
        hint = "fields are compared exactly, and one deployment's measurements are never used for another"
        return CellNotFoundError(f"{message}\nhint: {hint}")

    def _several(self, wanted: dict[str, Any], matches: list[Identity]) -> CellNotFoundError:
        varying = [n for n in FIELDS if any(not same(getattr(m, n), getattr(matches[0], n)) for m in matches)]
        lines = ["  " + ", ".join(f"{n}={shorten(getattr(m, n))}" for n in varying) for m in matches[:LISTED]]
        more = f"\n  and {len(matches) - LISTED} more" if len(matches) > LISTED else ""
        asked = ", ".join(f"{name}={shorten(value)}" for name, value in wanted.items()) or "no fields"
        return CellNotFoundError(
            f"{len(matches)} cells of {self.path} match {asked}; they differ in\n" + "\n".join(lines) + more + "\n"
            f"hint: give {' or '.join(varying)} as well",
            code="cell_ambiguous",
        )


def _plain(value: Any) -> Any:
    """NumPy scalars as Python ones, so that `tp` may come from an array."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return str(value) if isinstance(value, str) else value
