"""The file of a saved model: its members, in one of two containers.

    NPZ      a member is a file `NAME.npy` of an archive, stored and not compressed
    Parquet  a member is a row: name, dtype ("<f8"), shape ("[3, 4]"), data (its bytes, little-endian, in C order)

Either way a member in memory is the bytes of an NPY file, so that one digest seals both.  Reading never takes more
memory than a few times the size of the file, whatever the file says about itself.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fpmjax.atomic import replacing
from fpmjax.errors import ModelFileError, first_line
from fpmjax.parquet_footer import is_uncompressed

FORMAT = "fpmjax model"
MANIFEST, DIGEST = "manifest.npy", "digest.npy"
NPY = ".npy"
DTYPES = {np.dtype(name).str for name in ("bool", "u1", "i1", "u4", "i4", "u8", "i8", "f8")}
ARCHIVE, PARQUET = b"PK\x03\x04", b"PAR1"  # first bytes
COLUMNS = ("name", "dtype", "shape", "data")
LONGEST = 2**31 - 2**16  # bytes of a row that every reader of Parquet takes
ENDS = 1 << 16  # bytes at either end of a file, in which the mark of what it holds stands
AGAIN = "copy or save it again; files are not repaired"


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a saved model, whole or damaged; False for other files, and where there is none.

    An archive is one by its first bytes or by its suffix.  Parquet holds tables and observations too: there the mark
    of a model decides, at the beginning, which a cut file still has, or at the end.
    """
    ends = ends_of(path)
    if ends is None:
        return False
    head, tail = ends
    if head.startswith(PARQUET):
        return FORMAT.encode() in head or FORMAT.encode() in tail
    return head.startswith(ARCHIVE) or Path(path).suffix.lower() == ".npz"


def ends_of(path: str | os.PathLike[str]) -> tuple[bytes, bytes] | None:
    """The first and the last `ENDS` bytes of a regular file; None where there is none that can be read."""
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, os.path.getsize(path) - ENDS))
            return head, file.read(ENDS)
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return None


def write_members(path: str | os.PathLike[str], members: dict[str, bytes]) -> None:
    """The members in a file: Parquet by the suffix `.parquet`, else NPZ.  Raises ModelFileError `unwritable`."""
    path = named(path, "unwritable")
    to_bytes = parquet_of if path.suffix.lower() == ".parquet" else archive_of
    write(path, to_bytes(members))


def read_members(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The members of a file of either kind, which its first bytes tell.

    Raises ModelFileError: `unreadable`, `not_a_model`, `malformed` (a row of Parquet that is no array).
    """
    path = named(path, "unreadable")
    try:
        data = path.read_bytes()
    except OSError as error:
        refuse(f"cannot read {path}: {error.strerror}", "give a file that save_model wrote", "unreadable")
    parquet = data.startswith(PARQUET)
    members = rows_of_parquet(data, path) if parquet else members_of_archive(data, path)
    if not {MANIFEST, DIGEST} <= members.keys():
        refuse(f"{path} is {'Parquet' if parquet else 'an archive'}, but no saved model", AGAIN, "not_a_model")
    return members


# NPZ


def archive_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def members_of_archive(data: bytes, path: Any) -> dict[str, bytes]:
    """Only stored members, so that none unpacks to more than the file holds."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
                raise ValueError("its members are compressed")
            if sum(e.file_size for e in entries) > len(data):
                raise ValueError("its members overlap")
            members = {e.filename: archive.read(e) for e in entries}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        refuse(f"{path} is no saved model, or a damaged one: {error}", AGAIN, "not_a_model")
    if len(members) != len(entries):
        refuse(f"{path} names a member twice", AGAIN, "not_a_model")
    return members


# Parquet


def parquet_of(members: dict[str, bytes]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name.removesuffix(NPY): array_of(data) for name, data in members.items()}
    for name, array in arrays.items():
        if array.nbytes > LONGEST:
            what = f"array {name} is {array.nbytes:,} bytes long, but a row of Parquet holds {LONGEST:,}"
            refuse(what, "save the model as .npz, which has no such limit", "unwritable")
    types = (pa.string(), pa.string(), pa.string(), pa.large_binary())
    schema = pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in zip(COLUMNS, types, strict=True)],
        metadata={"format": FORMAT},
    )
    columns = (
        list(arrays),
        [array.dtype.str for array in arrays.values()],
        [json.dumps(array.shape) for array in arrays.values()],
        [array.tobytes() for array in arrays.values()],
    )
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], schema=schema)
    out = io.BytesIO()
    # A page a row: several long ones would overflow it.  Statistics would repeat whole arrays.
    plain = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, out, write_batch_size=1, **plain)
    return out.getvalue()


def rows_of_parquet(data: bytes, path: Any) -> dict[str, bytes]:
    import pyarrow as pa

    members: dict[str, bytes] = {}
    try:
        for name, dtype, shape, content in plain_rows(data, path):
            member = f"{name}{NPY}"
            if member in members:
                refuse(f"{path} names array {name} twice", AGAIN, "not_a_model")
            try:
                members[member] = npy(array_from(dtype, shape, content))
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                refuse(f"array {name} of {path} cannot be read: {error}", AGAIN, "malformed")
    except ModelFileError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, ArithmeticError, LookupError, TypeError) as error:
        what = first_line(error, None)
        refuse(f"{path} is no saved model, or a damaged one: {what}", AGAIN, "not_a_model")
    return members


def plain_rows(data: bytes, path: Any) -> Iterator[tuple[str, str, str, bytes]]:
    """The rows, one at a time: a value that is stored once but stands in many rows never fills the memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(data))
    if file.schema_arrow.names != list(COLUMNS):
        hint = "load_cells reads tables, Observations.read reads observations"
        refuse(f"{path} is Parquet, but no saved model: its columns are not {', '.join(COLUMNS)}", hint, "not_a_model")
    if not is_uncompressed(data):
        raise ValueError("its columns are compressed")
    rows = held = 0
    for batch in file.iter_batches(batch_size=1, use_threads=False):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if not all(isinstance(x, t) for x, t in zip(row, (str, str, str, bytes), strict=True)):
                raise ValueError("a row is not of text and bytes")
            rows, held = rows + 1, held + len(row[-1])
            if held > len(data):
                raise ValueError("its rows overlap")
            yield row
    if rows != file.metadata.num_rows:
        raise ValueError(f"it states {file.metadata.num_rows} rows, but holds {rows}")


def array_from(dtype: str, shape: str, content: bytes) -> np.ndarray:
    """The array of a row; ValueError unless it is plain numbers and exactly as long as its shape says."""
    if dtype not in DTYPES:
        raise ValueError(f"an array of {dtype[:20]!r} is no part of a model")
    lengths = json.loads(shape)
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError(f"the shape {shape[:60]} is no list of lengths")
    if math.prod(lengths) * np.dtype(dtype).itemsize != len(content):
        raise ValueError(f"an array of shape {shape[:60]} is {len(content)} bytes long")
    return np.frombuffer(content, dtype).reshape(lengths)


# Members


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0), allow_pickle=False)
    return out.getvalue()


def array_of(data: bytes) -> np.ndarray:
    """The array of an NPY member, read only; ValueError unless it is plain numbers and exactly as long as it says."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("unknown version of the array format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.str not in DTYPES:
        raise ValueError(f"an array of {dtype} is no part of a model")
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"an array of shape {shape} is {len(data) - file.tell()} bytes long")
    array = np.frombuffer(data, dtype, offset=file.tell()).copy()
    array.flags.writeable = False
    return array.reshape(shape, order="F" if fortran else "C")


def named(path: Any, code: str) -> Path:
    """The path as such; ModelFileError with this code where it names no file."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not is_encodable(text) or not Path(text).name:
        refuse(f"{path!r} is no path of a file", "give a text such as 'decode.npz', or a pathlib.Path", code)
    return Path(text)


def is_encodable(name: str) -> bool:
    """Whether the file system can be asked for this name at all."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def write(path: Path, data: bytes) -> None:
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        refuse(f"cannot write {path}: {error.strerror}", "name a file in a writable folder that exists", "unwritable")


def refuse(what: str, hint: str, code: str) -> NoReturn:
    raise ModelFileError(f"{what}\nhint: {hint}", code=code)
