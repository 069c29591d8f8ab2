"""The line of a long job: what it says, and that nobody but a terminal ever sees it."""

from __future__ import annotations

import io
import sys

import pytest

from fpmjax.progress import Progress, amount, clock_time


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True

    @property
    def lines(self) -> list[str]:
        """What was drawn, one redrawing after another."""
        return [line.rstrip() for line in self.getvalue().split("\r")]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    return Clock()


def test_a_line_shows_share_rate_and_remaining_time_and_is_taken_back(clock):
    terminal = Terminal()
    with Progress("reading traces", 2_900_000_000, unit="B", file=terminal, clock=clock, rich=False) as bar:
        clock.now += 10
        bar(1_305_000_000)
    told = "reading traces [#########...........]  45%  1.3 GB of 2.9 GB, 130 MB/s, 0:13 left"
    assert terminal.lines == ["", told, "", ""]
    assert terminal.getvalue().endswith("\r" + " " * len(told) + "\r")


def test_a_total_may_come_late_be_unknown_or_be_wrong(clock):
    terminal = Terminal()
    with Progress("reading", unit="iterations", file=terminal, clock=clock, rich=False) as bar:
        for done, total in ((5000, None), (6000, 12_000), (13_000, None)):
            clock.now += 1
            bar(done, total)
    assert terminal.lines[1:4] == [
        "reading: 5,000 iterations, 5,000/s",
        "reading [##########..........]  50%  6,000 of 12,000 iterations, 3,000/s, 0:02 left",
        "reading: 13,000 iterations, 4,333/s",
    ]


def test_a_short_job_shows_nothing_and_a_busy_one_is_drawn_ten_times_a_second(clock):
    terminal = Terminal()
    with Progress("x", 100, file=terminal, clock=clock, rich=False) as bar:
        clock.now += 0.4
        bar(99)
    assert terminal.getvalue() == ""
    with Progress("x", 1000, file=terminal, clock=clock, rich=False) as bar:
        clock.now += 1
        for done in range(1000):
            clock.now += 0.001
            bar(done)
    assert 10 <= terminal.getvalue().count("%") <= 11


def test_a_line_never_wraps(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    with Progress("a job of many words", 100, file=terminal, clock=clock, rich=False) as bar:
        clock.now += 9
        bar(50)
    assert max(map(len, terminal.lines)) == 29


def test_pipes_dumb_and_absent_terminals_see_nothing(clock, monkeypatch):
    pipe, dumb, closed = io.StringIO(), Terminal(), Terminal()
    closed.close()
    monkeypatch.setattr("sys.stderr", None)
    for file, term in ((pipe, "xterm"), (dumb, "dumb"), (closed, "xterm"), (None, "xterm")):
        monkeypatch.setenv("TERM", term)
        with Progress("x", 100, file=file, clock=clock, rich=False) as bar:
            clock.now += 9
            bar(50)
    assert pipe.getvalue() == dumb.getvalue() == ""


@pytest.mark.parametrize("rich", [False, True])
def test_a_terminal_that_goes_away_ends_the_line_and_not_the_job(clock, rich):
    terminal = Terminal()
    with Progress("x", 100, file=terminal, clock=clock, rich=rich) as bar:
        clock.now += 9
        bar(50)
        terminal.close()
        clock.now += 9
        bar(60)
        bar(70)


def test_the_line_is_taken_back_where_the_job_fails(clock):
    terminal = Terminal()
    with pytest.raises(KeyError), Progress("x", 100, file=terminal, clock=clock, rich=False) as bar:
        clock.now += 9
        bar(0)
        raise KeyError
    assert terminal.getvalue().endswith(" \r")


def test_rich_draws_the_same_words_and_takes_them_back(clock):
    terminal = Terminal()
    with Progress("reading traces", 200, unit="rows", file=terminal, clock=clock) as bar:
        clock.now += 10
        bar(100)
        clock.now += 1
        bar(150)
        assert "reading traces" in terminal.getvalue() and "50%" in terminal.getvalue()
        assert "100 of 200 rows, 10/s, 0:10 left" in terminal.getvalue() and "150 of 200 rows" in terminal.getvalue()
        clock.now += 1
        bar(300)  # beyond a wrong total
        assert "300 rows, 25/s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is cleared


def test_without_rich_the_line_is_plain(clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # what an import of it then finds
    terminal = Terminal()
    with Progress("x", 100, file=terminal, clock=clock) as bar:
        clock.now += 10
        bar(50)
    assert terminal.lines[1] == "x [##########..........]  50%  50 of 100, 5/s, 0:10 left"


def test_amounts_and_times():
    assert [amount(x, "B") for x in (0, 999, 1500, 123_456, 999_999, 5e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "123 kB",
        "1.0 MB",
        "5.0 GB",
    ]
    assert amount(1234567, "rows") == "1,234,567 rows" and amount(3, "") == "3"
    assert [clock_time(x) for x in (0, 6.2, 61, 3723)] == ["0:00", "0:07", "1:01", "1:02:03"]
