"""Whether a Parquet file is compressed, read from its footer without trusting it.

Arrow's own account of a damaged footer can end the process, and its reader unpacks a page to whatever size the file
states.  So the few bytes that say how columns are packed are walked here first: Thrift's compact protocol, which is a
tree of numbered fields.
"""

from __future__ import annotations

from typing import Any

ROW_GROUPS, COLUMN_CHUNKS, META_DATA, CODEC = 4, 1, 3, 4  # numbers of fields in Parquet's own description
UNCOMPRESSED = 0
TRUE, FALSE, BYTE, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12


def is_uncompressed(data: bytes) -> bool:
    """Whether every column of every row group is; ValueError where the footer does not say."""
    length = int.from_bytes(data[-8:-4], "little")
    if not 0 < length <= len(data) - 12 or data[-4:] != b"PAR1":
        raise ValueError("its footer is missing")
    try:
        footer = Walk(data[-8 - length : -8]).value(STRUCT)
        chunks = [chunk for group in footer[ROW_GROUPS] for chunk in group[COLUMN_CHUNKS]]
        return all(chunk[META_DATA][CODEC] == UNCOMPRESSED for chunk in chunks)
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError("its footer is damaged") from error


class Walk:
    """A cursor over bytes of the compact protocol; IndexError behind their end, ValueError for what it cannot hold."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def value(self, kind: int) -> Any:
        """The value of a type: an int, bytes, a list, or {number of a field: value}."""
        if kind == BYTE or kind in (TRUE, FALSE):  # in a list; as a field the type itself says it
            return self.byte()
        if BYTE < kind <= I64:
            number = self.varint()
            return (number >> 1) ^ -(number & 1)
        if kind == DOUBLE:
            return self.skip(8)
        if kind == BINARY:
            return self.skip(self.varint())
        if kind in (LIST, SET):
            head = self.byte()
            count = self.varint() if head >> 4 == 15 else head >> 4
            return [self.value(head & 15) for _ in range(count)]
        if kind == STRUCT:
            return self.fields()
        raise ValueError("its footer is damaged")

    def fields(self) -> dict[int, Any]:
        found, number = {}, 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.value(I64)
            kind = head & 15
            found[number] = kind if kind in (TRUE, FALSE) else self.value(kind)
        return found

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        number = shift = 0
        while True:
            part = self.byte()
            number |= (part & 127) << shift
            shift += 7
            if part < 128:
                return number
            if shift > 63:
                raise ValueError("its footer is damaged")

    def skip(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - count : self.at]
