"""The exact key of a cell, and how two keys differ.

A measurement is never borrowed from another model, backend version, quantisation or parallel layout: every
field below has to be equal.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """One deployment and what of it was executed; field names are the table's column names.

    Only `model` differs from its column, `model_path`.  Text that the table leaves null reads "", a null
    count reads None.  `dcp` is None where the table has no such column, which is not the same as 1.
    The four fields from `model_config_sha256` on default to the full text autoregressive execution.
    """

    model: str
    system: str
    backend: str
    backend_version: str
    gemm_quant_mode: str
    moe_quant_mode: str
    fmha_quant_mode: str
    comm_quant_mode: str
    kv_cache_dtype: str
    tp: int | None
    pp: int | None
    dp: int | None
    moe_tp: int | None
    moe_ep: int | None
    cp: int | None
    moe_backend: str = "auto"
    attention_backend: str = "auto"
    enable_wideep: bool = False
    enable_eplb: bool = False
    model_config_sha256: str = ""
    execution_profile: str = "full"
    engram_residency: str = "none"
    input_modality: str = "text"
    dcp: int | None = None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Pairs of field name and value, in declaration order."""
        return ((name, getattr(self, name)) for name in FIELDS)

    def differences(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The fields of this identity that differ from `wanted` (field name -> value asked for)."""
        return {name: getattr(self, name) for name, value in wanted.items() if not same(getattr(self, name), value)}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp"))
        usual = {f.name: f.default for f in dataclasses.fields(self) if f.default is not dataclasses.MISSING}
        special = "".join(f" {name}={shorten(value)}" for name, value in self if value != usual.get(name, value))
        kinds = "/".join(dict.fromkeys((self.gemm_quant_mode, self.kv_cache_dtype)))
        return f"{self.model} on {self.system}, {self.backend} {self.backend_version}, {sizes}, {kinds}{special}"


FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Identity))

DATABASE = ("system", "backend", "backend_version")
EXECUTION = ("model_config_sha256", "execution_profile", "engram_residency", "input_modality")
FULL_TEXT = ("", "full", "none", "text")
FLAGS = ("enable_wideep", "enable_eplb")
SIZES = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
TEXTS = tuple(name for name in FIELDS if name not in (*DATABASE, *FLAGS, *SIZES, *EXECUTION, "dcp"))
"""Text fields of the deployment: model, the quantisation modes and the two kernel backends."""


def column(field: str) -> str:
    """Name of a field's column in the Parquet file."""
    return "model_path" if field == "model" else field


def same(measured: Any, asked: Any) -> bool:
    """Equality without casting: True is not 1, and 1 is not "1"."""
    return type(measured) is type(asked) and measured == asked


def resembling(name: str, known: Collection[str]) -> list[str]:
    """The known names that an unknown one may mean: all that share its words, else the one of the closest spelling."""
    words = set(name.lower().split("_"))
    shared = [other for other in known if words <= (theirs := set(other.split("_"))) or theirs <= words]
    return shared or difflib.get_close_matches(name.lower(), known, 1)


def no_such_field(name: object) -> str:
    """What to say about a name that no identity has."""
    close = ["model"] if name == "model_path" else resembling(str(name), FIELDS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"an identity has no field {name!r}\nhint: {hint}the fields are {', '.join(FIELDS)}"


def shorten(value: Any, width: int = 100) -> str:
    """`repr` for a message, cut to `width` characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, a foreign object with a broken repr
        text = f"some {type(value).__name__}"
    return text if len(text) <= width else f"{text[: width - 3]}..."
