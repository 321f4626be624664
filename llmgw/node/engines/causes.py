"""Why an engine ended: from the way it ended and from its last words. The tables of known words are in `known`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

import attrs


@attrs.frozen
class Ended:
    """How a process ended. Both None: an adopted one, whose status only its first parent could have had.

    `oom_kills` is by how many the kernel's count of killed-for-memory processes grew during the run.
    `ours` says that we ended it ourselves.
    """

    exit_code: int | None = None
    signal: int | None = None
    oom_kills: int = 0
    ours: bool = False

    @property
    def signal_name(self) -> str:
        if self.signal is None:
            return ""
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"SIG{self.signal}"

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {self.signal_name}"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "ended with a status that nobody saw (it was adopted)"


@attrs.frozen
class Cause:
    """A stable word for programs, a sentence for people, and what to do."""

    code: str
    text: str
    remedy: str = ""
    line: str = ""  # the line it was read from


@attrs.frozen
class Row:
    """One known cause: an expression to search in each line of output."""

    code: str
    text: str
    remedy: str
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, code: str, pattern: str, text: str, remedy: str = "") -> Row:
        return cls(code, text, remedy, re.compile(pattern))


def search(rows: Iterable[Row], lines: Sequence[str]) -> Cause | None:
    """The first row of the table that any line matches, with the last such line."""
    for row in rows:
        for line in reversed(lines):
            if row.pattern.search(line):
                return Cause(row.code, row.text, row.remedy, line)
    return None


def telling(lines: Sequence[str], evidence: Sequence[str], cause: Cause | None) -> tuple[str, ...]:
    """The last lines of an engine; where its cause was said before them, that and what led to it in place of half.

    A vLLM whose peer has gone says so, and then two hundred lines of farewell.
    """
    if cause is None or not cause.line or cause.line in lines or cause.line not in evidence:
        return tuple(lines)
    half = max(1, len(lines) // 2)
    at = len(evidence) - 1 - list(reversed(evidence)).index(cause.line)
    said = [line for line in evidence[: at + 1] if line][-half:]
    rest = len(lines) - half - 1
    return (*said, "...", *(lines[-rest:] if rest > 0 else ()))


def from_end(ended: Ended) -> Cause | None:
    """What the way of ending says alone."""
    if ended.ours:
        return None
    match ended.signal_name:
        case "SIGILL":
            return Cause(
                "cpu-unsupported",
                "this build of the engine needs instructions that this CPU lacks",
                "use a build for this CPU",
            )
        case "SIGKILL" if ended.oom_kills:
            return Cause(
                "out-of-memory",
                "the kernel killed it because the machine (or its cgroup) ran out of memory",
                "give the shard more memory, or place less on this node",
            )
        case "SIGKILL":
            return Cause(
                "killed",
                "somebody killed it: no process was killed for memory meanwhile",
                "look for an operator, a script or a container limit",
            )
        case "SIGTERM" | "SIGINT" | "SIGHUP" | "SIGQUIT":
            return Cause("killed", f"somebody sent it {ended.signal_name}", "look for an operator or a script")
        case "SIGSEGV" | "SIGBUS" | "SIGABRT" | "SIGFPE":
            return Cause("crashed", f"the engine crashed ({ended.signal_name})", "the log before it may say why")
    match ended.exit_code:
        case 126:
            return Cause(
                "cannot-execute", "the engine's program cannot be executed", "check its permissions and architecture"
            )
        case 127:
            return Cause("engine-missing", "the engine's program is not there", "install the engine on this node")
        case 0:
            # A leader whose follower died, and an engine told to stop by something else, leave with 0.
            return Cause(
                "ended", "it ended by itself, which a serving engine never does", "the log before it may say why"
            )
    return None


def probable(rows: Iterable[Row], lines: Sequence[str], ended: Ended) -> Cause | None:
    """The probable cause. A kill for memory, as counted by the kernel, and missing instructions outweigh words."""
    by_end = from_end(ended)
    by_words = search(rows, lines)
    if by_end is not None and (
        by_end.code == "cpu-unsupported" or (by_end.code == "out-of-memory" and by_words is None)
    ):
        return by_end
    return by_words or by_end
