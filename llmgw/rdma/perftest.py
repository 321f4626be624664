"""What a perftest program printed, read by the heading of its table (E5).

Layouts differ by version and by option: columns come and go, MB/sec became MiB/sec in 2024 (both are 2^20 bytes a
second), banners, warnings and CUDA preambles stand anywhere. So the heading says which column is which, and only
a line of numbers that fits it is a row. Pure: text in, a value out, whatever the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

import attrs

#: The largest message that perftest sends (2^31 bytes); a row with more is memory that was never written.
MOST_SIZE = 1 << 31
#: More iterations than any run can have; the garbage row of a failed server has 3,547,200,640,032,715,618.
MOST_ITERATIONS = 1 << 48
#: More than any link carries, in Gb/s.
MOST_GBPS = 100_000.0
#: The oldest version that newer ones talk to.
OLDEST = 5.70
#: A latency above ten minutes is no latency, in microseconds.
MOST_MICROSECONDS = 6e8

#: What one unit of a bandwidth column is in Gb/s. perftest divides by 2^20 under both names.
UNITS = {
    "gb/sec": 1.0,
    "mb/sec": (1 << 20) * 8 / 1e9,
    "mib/sec": (1 << 20) * 8 / 1e9,
}

_COLUMN = re.compile(
    r"#\w+|(?:99(?:\.\d+)?% )?[A-Za-z_]\w*(?: [A-Za-z]\w*){0,2}\[[^\]]{1,24}\]|[A-Za-z_]\w*(?: [A-Za-z]\w*)?"
)
#: Longer lines are neither headings nor rows.
_MOST_LINE = 1000


@attrs.frozen
class Row:
    """One line of a table. Bandwidth is decimal Gb/s, never the peak; latency is the typical one (the median)."""

    size: int
    iterations: int
    average_gbps: float | None = None
    latency_us: float | None = None
    message_rate: float | None = None  # millions of messages a second

    @property
    def measured(self) -> bool:
        """Whether the row says anything: 0.00 with a clean exit means that perftest could not measure."""
        return bool(self.iterations and (self.average_gbps or self.latency_us))


@attrs.frozen
class Column:
    name: str
    unit: str


def heading(line: str) -> tuple[Column, ...]:
    """The columns that a line names; empty when it is no heading."""
    if len(line) > _MOST_LINE or "#bytes" not in line or "#iterations" not in line:
        return ()
    columns = []
    for found in _COLUMN.findall(line[line.index("#bytes") :]):
        name, _, unit = found.partition("[")
        columns.append(Column(name.strip().lower(), unit.rstrip("]").strip().lower()))
    return tuple(columns)


def row(line: str, columns: tuple[Column, ...]) -> Row | None:
    """A row under these columns; None for any other line, and for numbers that cannot be true."""
    words = line.split()
    # Only CPU_Util may be missing at the end: the server's row goes without it in some versions.
    optional = columns[-1].name == "cpu_util" if columns else False
    if not columns or len(words) not in (len(columns), len(columns) - optional) or len(line) > _MOST_LINE:
        return None
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    cells = dict(zip((column.name for column in columns), numbers, strict=False))
    units = {column.name: column.unit for column in columns}
    size, iterations = cells.get("#bytes", 0.0), cells.get("#iterations", 0.0)
    if not (0 < size <= MOST_SIZE and size == int(size)):
        return None
    if iterations > MOST_ITERATIONS or iterations != int(iterations):
        return None
    average: float | None = None
    if "bw average" in cells:
        factor = UNITS.get(units["bw average"])
        if factor is None:
            return None
        average = cells["bw average"] * factor
        if average > MOST_GBPS:
            return None
    latency = cells.get("t_typical", cells.get("t_avg"))
    if latency is not None and (units.get("t_typical", units.get("t_avg")) != "usec" or latency > MOST_MICROSECONDS):
        return None
    if average is None and latency is None:
        return None
    return Row(int(size), int(iterations), average, latency, cells.get("msgrate"))


def tables(text: str) -> list[list[Row]]:
    """The rows under each heading, in order. Foreign lines between heading and rows are passed over."""
    found: list[list[Row]] = []
    columns: tuple[Column, ...] = ()
    for line in text.splitlines():
        if named := heading(line):
            columns = named
            found.append([])
        elif columns and (read := row(line, columns)):
            found[-1].append(read)
    return found


def result(text: str, size: int | None = None) -> Row | None:
    """The row that answers a run with messages of `size` bytes; None when there is none.

    Of a sweep without that size it is the largest message's row. Where one stream holds client and server
    (the same table twice), the first table with rows counts. Of several rows of one size (a run without
    end prints one every few seconds) it is the last.
    """
    rows = next((rows for rows in tables(text) if rows), [])
    return _choose(rows, size)


def _choose(rows: Iterable[Row], size: int | None) -> Row | None:
    best: Row | None = None
    for each in rows:
        if best is None:
            best = each
        elif size is not None and each.size == size:
            best = each if each.measured or best.size != size else best
        elif best.size != size and each.size >= best.size:
            best = each
    return best


def from_json(text: str, *, gbits: bool) -> Row | None:
    """The row of a JSON report; None when it is not JSON, which it never was before release 24.01.

    The file names no unit, so the caller says whether --report_gbits was given.
    """
    try:
        results = json.loads(text)["results"]
        size, iterations = int(results["MsgSize"]), int(results["n_iterations"])
        average, rate = float(results["BW_average"]), float(results.get("MsgRate", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
        return None
    average *= 1.0 if gbits else UNITS["mib/sec"]
    sane = 0 < size <= MOST_SIZE and 0 <= iterations <= MOST_ITERATIONS and 0 <= average <= MOST_GBPS
    return Row(size, iterations, average, None, rate) if sane and math.isfinite(rate) else None


def version(text: str) -> str:
    """The program's version from `--version` ("Version: 6.06"), which exits with 1; "" when it says none."""
    found = re.search(r"(?i)\bversion\b\s*:?\s*v?(\d{1,4}(?:[.\-]\d{1,4}){0,3})", text)
    return found[1] if found else ""


def options(text: str) -> frozenset[str]:
    """The long options that `--help` lists, without dashes."""
    return frozenset(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text))


def differ(ours: str, theirs: str) -> str:
    """Why two versions cannot talk, in a sentence; "" when they can, or when it is not known.

    From 5.70 on each asks the other for no less than that, and compares them as decimal numbers. What else changed
    since, 6.00 included, the later one leaves out towards an older one.
    """
    mine, other = _decimal(ours), _decimal(theirs)
    if mine is not None and other is not None and min(mine, other) < OLDEST <= max(mine, other):
        return f"perftest {ours} and {theirs}: newer versions refuse to talk to versions before {OLDEST:.2f}"
    return ""


def _decimal(version: str) -> float | None:
    found = re.match(r"\d+(?:\.\d+)?", version)
    return float(found[0]) if found else None
