"""Reads observations from columns: Parquet, Arrow and CSV.

What `fpmjax.observe.column_writer` writes, and the names under which measurements of this kind are published.  Where a
file has no column for a phase, `phase`, `batch_size`, `total_prefill_tokens` and `total_kv_read_tokens` say it; `mixed`
rows need columns of their own for at least the decode work.  Where both are there, they have to agree.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from fpmjax import strict_json
from fpmjax.errors import MetricsError, TraceError
from fpmjax.metrics import show
from fpmjax.observe.record import MOST_ENTRIES, UNSPECIFIED
from fpmjax.observe.speculation import limit_of, shows_drafts
from fpmjax.work import COUNTS, VARIANCES, RequestLists, Work

# Field -> the names of its column, the written one first.
NAMES = {
    "wall_ms": ("wall_ms", "latency_ms"),
    "prefill_requests": ("prefill_requests", "num_prefill_requests"),
    "prefill_tokens": ("prefill_tokens", "sum_prefill_tokens", "total_prefill_tokens"),
    "prefill_kv": ("prefill_kv", "prefill_kv_tokens", "sum_prefill_kv_tokens", "kv_prefill"),
    "decode_requests": ("decode_requests", "num_decode_requests", "n_decode", "batch"),
    "decode_kv": ("decode_kv", "decode_kv_tokens", "sum_decode_kv_tokens", "kv_decode", "kv"),
    "prefill_length_var": ("prefill_length_var", "var_prefill_length"),
    "decode_kv_var": ("decode_kv_var", "var_decode_kv", "var_decode_kv_tokens"),
    "phase": ("phase",),
    "batch": ("batch_size",),
    "kv": ("total_kv_read_tokens",),
    "timing": ("timing", "timing_scope", "latency_source"),
    "draft_length": ("draft_length",),
    "extend_lengths": ("extend_lengths",),
    "past_kv_lengths": ("past_kv_lengths",),
}
CSV = (".csv", ".csv.gz")
IPC = (".arrow", ".feather", ".ipc")
LISTS = ("extend_lengths", "past_kv_lengths")
REQUESTS = ("prefill_requests", "decode_requests")
NOTE = b"fpmjax.observations"  # key in the schema metadata
PHASES = ("decode", "prefill", "mixed")


def refuse(code: str, message: str, hint: str) -> NoReturn:
    raise TraceError(f"{message}\nhint: {hint}", code=code)


def read_columns(source: str | os.PathLike[str] | pa.Table) -> tuple[Work, np.ndarray, str]:
    """(work [n, r], milliseconds float64 [n], timing); see the module for the columns."""
    label = label_of(source)
    if isinstance(source, pa.Table):
        return Reader(label, source).read()
    try:
        table = _open(label)
        _ = table.column_names  # ValueError for a CSV that is no text
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        refuse(
            "file", f"{label} cannot be read: {str(error)[:300]}", "observations are Parquet, Arrow IPC or CSV files"
        )
    return Reader(label, table).read()


def label_of(source: Any, what: str = "source") -> str:
    """The file, as messages name it; TraceError `file` for what is neither a file name nor a table."""
    if isinstance(source, pa.Table):
        return "the table"
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        given = f"of type {type(source).__name__}" if name is None else show(name)
        refuse("file", f"the {what} is {given}", "name a Parquet, Arrow or CSV file, or pass a pyarrow.Table")
    return name


def _open(label: str) -> pa.Table:
    name = label.lower()
    if name.endswith(CSV):
        import pyarrow.csv as pacsv

        return pacsv.read_csv(label)
    if name.endswith(IPC):
        import pyarrow.feather as feather

        return feather.read_table(label)
    import pyarrow.parquet as pq

    return pq.ParquetFile(label).read()


class Reader:
    """The columns of one table by what they mean."""

    def __init__(self, label: str, table: pa.Table):
        self.label, self.table, self.n = label, table, table.num_rows
        self.columns: dict[str, pa.Array] = {}
        for field, names in NAMES.items():
            found = [name for name in names if name in table.column_names]
            if len(found) > 1:
                self.refuse(f"columns {found[0]!r} and {found[1]!r} are the same quantity", "keep one of them")
            if found:
                if table.column_names.count(found[0]) > 1:
                    self.refuse(f"column {found[0]!r} occurs twice", "keep one of them")
                column = table.column(found[0]).combine_chunks()
                self.columns[field] = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        try:
            note = strict_json.decode((table.schema.metadata or {}).get(NOTE, b"{}"))
        except ValueError:
            note = {}
        self.note: dict[str, Any] = note if isinstance(note, dict) else {}

    def refuse(self, message: str, hint: str, code: str = "columns") -> NoReturn:
        refuse(code, f"{self.label}: {message}", hint)

    def read(self) -> tuple[Work, np.ndarray, str]:
        if "wall_ms" not in self.columns:
            self.refuse("there is no column wall_ms", "name the milliseconds of each iteration wall_ms or latency_ms")
        self.refuse_speculation()
        ranks = self.ranks()
        fields: dict[str, Any] = {
            name: self.numbers(name, np.float64 if name in VARIANCES else np.uint32, ranks)
            for name in (*COUNTS, *VARIANCES)
            if name in self.columns
        }
        if "batch" in self.columns:
            fields = self.by_phase(fields, ranks)
        elif not {"prefill_requests", "decode_requests"} & set(fields):
            self.refuse(
                "no column says which work was done",
                "give decode_requests and decode_kv, prefill_requests and prefill_tokens, or phase and batch_size",
            )
        fields.setdefault("decode_requests", np.zeros((self.n, ranks), np.uint32))
        self.refuse_contradiction(fields)
        try:
            work = Work.of(**fields, ranks=True)
        except MetricsError as error:
            raise MetricsError(f"{self.label}: {error}", code=error.code) from None
        if lists := self.lists(work, ranks):
            work = Work(**{**{name: getattr(work, name) for name in (*COUNTS, *VARIANCES)}, "lists": lists})
        return work, self.numbers("wall_ms", np.float64, 1)[:, 0], self.timing()

    def ranks(self) -> int:
        """Length of the rank axis that every list column agrees on; 1 without any."""
        sizes = set()
        for name in (*COUNTS, *VARIANCES):
            column = self.columns.get(name)
            if column is not None and _is_ragged(column.type):
                lengths = set(column.value_lengths().to_pylist())
                if len(lengths) > 1 or None in lengths:
                    self.refuse(
                        f"column {name} has lists of {sorted(map(str, lengths))[:5]} entries",
                        "give every row one entry per rank; an idle rank is zeros",
                    )
                sizes |= lengths
            elif column is not None and pa.types.is_fixed_size_list(column.type):
                sizes.add(column.type.list_size)
            elif column is not None:
                sizes.add(1)
        if len(sizes) > 1 or 0 in sizes:
            self.refuse(
                f"the columns have {' and '.join(map(str, sorted(sizes)))} entries per row",
                "give every column one entry per rank",
            )
        return sizes.pop() if sizes else 1

    def numbers(self, name: str, dtype: type, ranks: int) -> np.ndarray:
        """Column -> [n, ranks]; counts have to be integers of 32 bits, as they stand in the file."""
        column = self.columns[name]
        if pa.types.is_nested(column.type):
            if column.null_count:
                self.refuse(f"column {name} has a null in row {_first_null(column)}", "give a number", "values")
            column = self.entries(name, column)
        wanted = pa.types.is_integer(column.type) or (dtype is np.float64 and pa.types.is_floating(column.type))
        if column.null_count or not (wanted or (pa.types.is_null(column.type) and not len(column))):
            fault = f"a null in row {_first_null(column) // ranks}" if column.null_count else f"type {column.type}"
            self.refuse(f"column {name} has {fault}", "counts are whole numbers, times are numbers", "values")
        values = column.to_numpy(zero_copy_only=False)
        if dtype is np.uint32 and values.size and (values.min() < 0 or values.max() > 2**32 - 1):
            row = int(np.argmax((values < 0) | (values > 2**32 - 1)))
            self.refuse(
                f"column {name} is {values[row]} in row {row // ranks}", "a count is from 0 to 4294967295", "values"
            )
        if values.size != self.n * ranks:
            self.refuse(f"column {name} does not have {ranks} entries in every row", "give one entry per rank")
        return values.astype(dtype).reshape(self.n, ranks)

    def entries(self, name: str, column: Any) -> Any:
        """What a column of lists holds, one after another."""
        if not (_is_ragged(column.type) or pa.types.is_fixed_size_list(column.type)):
            self.refuse(
                f"column {name} has type {column.type}", "give numbers, or lists of one entry per rank", "values"
            )
        return column.flatten()

    def by_phase(self, fields: dict[str, Any], ranks: int) -> dict[str, Any]:
        """What `phase` and `batch_size` say where a phase has no columns of its own."""
        if ranks > 1:
            self.refuse("batch_size goes with one rank", "name the columns prefill_requests and decode_requests")
        batch = self.numbers("batch", np.uint32, 1)
        phase = self.words("phase", PHASES) if "phase" in self.columns else None
        decode = None if phase is None else (phase == "decode")[:, None]
        if "prefill_requests" not in fields and "decode_requests" in fields:
            if (over := fields["decode_requests"] > batch).any():
                self.refuse(f"batch_size is below decode_requests in row {int(over.argmax())}", "count all requests")
            fields["prefill_requests"] = batch - fields["decode_requests"]
        elif "decode_requests" not in fields:
            if decode is None or phase is None or (phase == "mixed").any():
                self.refuse(
                    "a mixed row does not say how much of it is decode work" if phase is not None else "no phase",
                    "give prefill_requests, prefill_kv, decode_requests and decode_kv columns",
                )
            fields["decode_requests"] = np.where(decode, batch, np.uint32(0))
            fields.setdefault("prefill_requests", np.where(decode, np.uint32(0), batch))
        given = [name for name in ("prefill_kv", "decode_kv") if name in fields]
        if "kv" in self.columns and len(given) == 1:
            kv = self.numbers("kv", np.uint32, 1)
            (other,) = {"prefill_kv", "decode_kv"} - set(given)
            fields[other] = np.maximum(kv, fields[given[0]]) - fields[given[0]]
        elif "kv" in self.columns and not given:
            if decode is None or phase is None or (phase == "mixed").any():
                self.refuse("total_kv_read_tokens does not say whose KV it is", "give prefill_kv and decode_kv columns")
            kv = self.numbers("kv", np.uint32, 1)
            fields["decode_kv"] = np.where(decode, kv, np.uint32(0))
            fields["prefill_kv"] = np.where(decode, np.uint32(0), kv)
        return fields

    def refuse_contradiction(self, fields: dict[str, Any]) -> None:
        """One file may say the same work twice, by phase and in counts of its own, but not two different things."""

        def total(*names: str) -> np.ndarray:
            """int64 [n], over ranks."""
            zero = np.zeros(self.n, np.int64)
            return sum((fields[name].sum(-1, dtype=np.int64) for name in names if name in fields), zero)

        wrong: dict[str, np.ndarray] = {}
        for name, parts in (("batch", REQUESTS), ("kv", ("prefill_kv", "decode_kv"))):
            if name in self.columns:
                wrong[NAMES[name][0]] = self.numbers(name, np.uint32, 1)[:, 0] != total(*parts)
        if "phase" in self.columns and _is_text(self.columns["phase"].type):
            phase = self.words("phase")
            idle = {"decode": total(REQUESTS[0]), "prefill": total(REQUESTS[1])}  # what each phase has none of
            wrong["phase"] = np.any([(phase == word) & (other > 0) for word, other in idle.items()], axis=0)
        for name, rows in wrong.items():
            if rows.any():
                row = int(rows.argmax())
                value = show(self.table.column(name)[row].as_py())
                counts = [f"{field} {show(fields[field][row].tolist())}" for field in COUNTS if field in fields]
                self.refuse(
                    f"row {row} says {name} {value}, but also {', '.join(counts)}",
                    "keep the columns of one of them",
                    "values",
                )

    def lists(self, work: Work, ranks: int) -> RequestLists | None:
        given = [self.columns.get(name) for name in LISTS]
        extend, past = given
        if extend is None and past is None:
            return None
        if extend is None or past is None:
            self.refuse(f"only one of {' and '.join(LISTS)} is there", "give both, or neither")
        arrays, counts = [], []
        for name, column in zip(LISTS, (extend, past), strict=True):
            if ranks > 1:
                if column.null_count or not pa.types.is_nested(column.type):
                    self.refuse(f"column {name} is not one list per rank", "a rank without lists is a null inside")
                column = self.entries(name, column)
            if not _is_ragged(column.type):
                self.refuse(f"column {name} has type {column.type}", "give one list of integers per rank")
            values = column.flatten()
            if len(column) != self.n * ranks or not pa.types.is_integer(values.type) or values.null_count:
                self.refuse(f"column {name} is not one list of integers per rank", "a rank without lists is a null")
            flat = values.to_numpy(zero_copy_only=False)
            if flat.size and flat.min() < 0:
                self.refuse(f"column {name} has a negative entry", "lengths are tokens", "values")
            lengths = column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
            noted = self.note.get("lists")
            width = max(int(lengths.max(initial=0)), noted if isinstance(noted, int) else 0)
            if len(lengths) * width > MOST_ENTRIES:
                self.refuse(
                    f"column {name}: {len(lengths)} lists padded to {width} entries each do not fit in memory",
                    "read fewer rows at a time, or leave the lists out",
                    "too_large",
                )
            rows = np.zeros((len(lengths), width), np.uint64)
            rows[np.arange(width) < lengths[:, None]] = flat
            arrays.append(rows.reshape(self.n, ranks, width))
            counts.append(lengths.reshape(self.n, ranks).astype(np.int32))
        requests = work.prefill_requests.astype(np.int64) + work.decode_requests
        for name, count in zip(LISTS, counts, strict=True):
            other = (count >= 0) & (count != requests) | ((count < 0) != (counts[0] < 0))
            if other.any():
                row = int(other.any(-1).argmax())
                self.refuse(
                    f"column {name} does not list every request of row {row}", "one entry per request", "values"
                )
        return RequestLists(arrays[0], arrays[1], counts[0])

    def words(self, name: str, known: tuple[str, ...] | None = None) -> np.ndarray:
        """Object array [n] of text, "" for a null."""
        column = self.columns[name]
        if not _is_text(column.type):
            self.refuse(f"column {name} has type {column.type}", "it holds text", "values")
        column = column.cast(pa.large_string())
        words = column.fill_null("").to_numpy(zero_copy_only=False).astype(object)
        if known is not None and (other := ~np.isin(words, known)).any():
            row = int(other.argmax())
            what = repr(words[row]) if column[row].is_valid else "null"
            self.refuse(f"{name} is {what} in row {row}", f"it is one of {', '.join(known)}", "values")
        return words

    def timing(self) -> str:
        noted = self.note.get("timing")
        if isinstance(noted, str) and noted:
            return noted
        words = sorted({word or UNSPECIFIED for word in self.words("timing")}) if "timing" in self.columns else []
        if len(words) > 1:
            self.refuse(
                f"rows of different clocks: {', '.join(map(show, words[:5]))}",
                "read the rows of one clock at a time",
                "mixed_timing",
            )
        return words[0] if words else UNSPECIFIED

    def refuse_speculation(self) -> None:
        """A fit sees ordinary decoding only."""
        for i, name in enumerate(self.table.column_names):
            limit = limit_of(name)
            for row, value in enumerate(self.table.column(i).to_pylist() if limit is not None else ()):
                if shows_drafts(value, limit or 0):
                    self.refuse(
                        f"row {row} was measured with {name} {show(value)}",
                        "observations are ordinary decoding; a draft length belongs to the query",
                        "speculative",
                    )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def _is_ragged(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _first_null(column: pa.Array) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
