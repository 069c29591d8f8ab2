"""Reads the rows of one writer quickly: the layout is learnt from a row that the careful reader accepted.

A writer repeats itself: the same keys in the same order, only the values change.  `learn` turns one accepted row
into a regular expression of it, the keys literal, every value replaced by what JSON and the schema allow there.  A
row that matches is therefore valid, and its values are those of the groups; a row that does not match says nothing
and goes to the careful reader.  Whatever could need a closer look (10-digit counts, escapes, signs) does not match.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import itemgetter

from fpmjax.observe.record import CLOCK_SECONDS, MIXED, UNSPECIFIED, Row, Stream, names_clock
from fpmjax.observe.speculation import beyond_ordinary, limit_of

TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[{}\[\],:]|[ \t\r\n]+')
COUNT = rb"(0|[1-9]\d{0,8})"
LARGE = rb"(0|[1-9]\d{0,17})"
NUMBER = rb"((?:0|[1-9]\d{0,16})(?:\.\d{1,20})?(?:[eE][-+]?\d{1,2})?)"
TEXT = rb'"([ !#-\[\]-~]*)"'
LENGTHS = rb"\[((?:0|[1-9]\d{0,8})(?:, ?(?:0|[1-9]\d{0,8}))*)?\]"
LITERAL = None  # the value itself, as the accepted row has it

_SCHEDULED = ("event", "fpm", "scheduled_requests")
# The values of a row in the order of `Layout.read`, each with what may stand there.
GROUPS: dict[tuple[str, ...], bytes] = {
    ("event", "source", "namespace"): TEXT,
    ("event", "source", "component"): TEXT,
    ("event", "source", "producer_id"): TEXT,
    ("event", "fpm", "worker_id"): TEXT,
    ("event", "fpm", "dp_rank"): COUNT,
    ("event", "fpm", "counter_id"): LARGE,
    ("event", "observed_at_unix_ms"): LARGE,
    ("event", "capture_mode"): rb'"(sampled|full)"',
    ("event", "fpm", "wall_time"): NUMBER,
    (*_SCHEDULED, "num_prefill_requests"): COUNT,
    (*_SCHEDULED, "sum_prefill_tokens"): COUNT,
    (*_SCHEDULED, "sum_prefill_kv_tokens"): COUNT,
    (*_SCHEDULED, "num_decode_requests"): COUNT,
    (*_SCHEDULED, "sum_decode_kv_tokens"): COUNT,
    (*_SCHEDULED, "var_prefill_length"): NUMBER,
    (*_SCHEDULED, "var_decode_kv_tokens"): NUMBER,
}
OPTIONAL: dict[tuple[str, ...], bytes] = {
    ("event", "fpm", "timing_scope"): TEXT.replace(b"*", b"+"),
    (*_SCHEDULED, "extend_lengths"): LENGTHS,
    (*_SCHEDULED, "past_kv_lengths"): LENGTHS,
}
_QUEUED = ("event", "fpm", "queued_requests")
CHECKED: dict[tuple[str, ...], bytes | None] = {
    ("event", "schema"): LITERAL,
    ("event", "fpm", "version"): LITERAL,
    **dict.fromkeys(
        [(*_QUEUED, name) for name in ("num_prefill_requests", "sum_prefill_tokens")]
        + [(*_QUEUED, name) for name in ("num_decode_requests", "sum_decode_kv_tokens")],
        COUNT,
    ),
    **dict.fromkeys([(*_QUEUED, name) for name in ("var_prefill_length", "var_decode_kv_tokens")], NUMBER),
}
# Any other value, by the first byte of the one seen: only its kind is kept.
OTHER_TEXT = rb'"[ !#-\[\]-~]*"'
OTHER_NUMBER = rb"(?:0|[1-9]\d{0,16})(?:\.\d{1,20})?(?:[eE][-+]?\d{1,2})?"
OTHER_WORD = rb"(?:true|false|null)"


class Layout:
    """The regular expression of one kind of row, and where its groups go."""

    def __init__(self, pattern: bytes, order: list[tuple[str, ...]], speculation: tuple[str, ...] = ()):
        self.match = re.compile(pattern).fullmatch
        wanted = [*GROUPS, *OPTIONAL]
        self.pick: Callable[[tuple], tuple] = itemgetter(*(order.index(w) if w in order else -1 for w in wanted))
        self.streams: dict[tuple[bytes, ...], Stream] = {}
        self.clocks: dict[bytes | None, str] = {None: UNSPECIFIED}
        self.speculation = speculation

    def read(self, line: bytes) -> Row | None:
        """The record of a row of this layout; None where it is another one, or has to be looked at."""
        found = self.match(line)
        if found is None:
            return None
        groups = self.pick((*found.groups(), None))
        try:
            stream = self.streams[groups[:5]]
        except KeyError:
            *names, rank = (group.decode() for group in groups[:5])
            stream = self.streams[groups[:5]] = Stream(names[0], names[1], names[2], names[3], int(rank))
        _, _, _, _, _, counter, observed, mode, wall, a, b, c, d, e, v, w, scope, extend, past = groups
        a, b, c, d, e, wall = int(a), int(b), int(c), int(d), int(e), float(wall)
        if (not a and (b or c)) or (not d and e) or wall >= CLOCK_SECONDS:
            return None
        clock = self.clocks.get(scope)
        if clock is None:
            clock = scope.decode()
            if clock == MIXED or not names_clock(clock):
                return None
            self.clocks[scope] = clock
        if extend is not None or past is not None:
            extend, past = (tuple(map(int, x.split(b","))) if x else () for x in (extend, past))
            if not len(extend) == len(past) == a + d or beyond_ordinary(extend, a, b + d):
                return None
        return Row(
            stream,
            int(counter),
            int(observed),
            mode == b"full",
            clock,
            wall,
            (a, b, c, d, e),
            (float(v), float(w)),
            extend,
            past,
            speculation=self.speculation,
        )


def learn(line: bytes) -> Layout | None:
    """The layout of an accepted row; None where it lacks a field or holds something unforeseen."""
    pattern: list[bytes] = []
    order: list[tuple[str, ...]] = []
    path: list[str] = []  # the key at every depth
    speculation: set[str] = set()
    at_key, in_list = False, False
    for token in TOKEN.findall(line):
        if in_list:  # its elements are in the pattern already
            in_list = token != b"]"
            continue
        piece = re.escape(token)
        if token == b"{":
            path.append("")
            at_key = True
        elif token == b"}":
            path.pop()
        elif token == b",":
            at_key = True
        elif token == b":":
            at_key = False
        elif token.isspace():
            pass
        elif at_key:
            path[-1] = token[1:-1].decode()
            if limit_of(path[-1]) is not None:
                speculation.add(path[-1])
        else:
            here = tuple(path)
            allowed = GROUPS.get(here) or (OPTIONAL.get(here) if token != b"null" else None)
            if token == b"[":
                if allowed is not LENGTHS:
                    return None
                in_list = True
            if allowed is not None:
                piece = allowed
                order.append(here)
            elif here in CHECKED:
                if (allowed := CHECKED[here]) is not None:
                    piece = allowed
                    order.append(here)
            elif here not in OPTIONAL and speculation.isdisjoint(here):  # what shows no drafts is kept to the letter
                piece = _kind(token)
        pattern.append(piece)
    return Layout(b"".join(pattern), order, tuple(sorted(speculation))) if set(GROUPS) <= set(order) else None


def _kind(token: bytes) -> bytes:
    if token[:1] == b'"':
        return OTHER_TEXT
    return OTHER_WORD if token[:1].isalpha() else OTHER_NUMBER
