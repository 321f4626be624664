"""Logging: to stderr for a person or as JSON, and into a ring that `ctl logs` reads. Secrets are blotted out."""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO, TypeAlias

import attrs
import structlog
import trio
from structlog.typing import EventDict, Processor, WrappedLogger

from llmgw.config import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
#: The longest line that the ring keeps, in characters.
LINE = 4000

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(llmgw1\.[a-z0-9]+)\.[\w-]+(\.[\w-]+)?"), r"\1.***"),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
        "*** private key ***",
    ),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}"), r"\1***"),
    (re.compile(r"\b(sk-|hf_)[\w-]{8,}"), r"\1***"),
    (re.compile(r"(://[^\s/:@]*:)[^\s/@]+@"), r"\1***@"),
    (
        re.compile(r"(?i)\b([\w-]*(?:api[_-]?key|token|secret|password)[\"']?\s*[=:]\s*[\"']?)(?!\*)[^\s\"',;]{6,}"),
        r"\1***",
    ),
)
_SECRET_KEYS = re.compile(r"(?i)(^|_)(token|secret|password|api_?key|authorization|cookie)$")

Pairs: TypeAlias = Mapping[str, object]


def redact(text: str) -> str:
    """Text without tokens and keys: join tokens keep their id, so that one can tell which it was."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


@attrs.define
class Ring:
    """The last lines of this process' log, each with a number that only grows."""

    most: int = 5000
    _lines: deque[str] = attrs.field(init=False, factory=deque)
    _last: int = 0
    _changed: trio.Event = attrs.field(factory=trio.Event)
    _token: trio.lowlevel.TrioToken | None = None

    @property
    def cursor(self) -> int:
        """The number of the newest line; 0 when there never was one."""
        return self._last

    def add(self, line: str) -> None:
        """Append; the oldest lines make room. Wakes who waits."""
        self._lines.append(line if len(line) <= LINE else line[: LINE - 1] + "…")
        self._last += 1
        while len(self._lines) > self.most:
            self._lines.popleft()
        if self._token is not None:
            changed, self._changed = self._changed, trio.Event()
            try:
                # Lines come from threads, too.
                self._token.run_sync_soon(changed.set)
            except trio.RunFinishedError:
                self._token = None

    def last(self, lines: int) -> tuple[str, ...]:
        """The newest lines, oldest of them first."""
        return tuple(self._lines)[max(0, len(self._lines) - lines) :] if lines > 0 else ()

    def after(self, cursor: int, most: int = 1000) -> tuple[tuple[str, ...], int, bool]:
        """Lines newer than `cursor`, the cursor behind them, and whether some between were lost already.

        A cursor from before a restart of this process, above ours, starts from the oldest line there is.
        """
        oldest = self._last - len(self._lines)
        lost = cursor < oldest or cursor > self._last
        start = oldest if lost else cursor
        lines = tuple(self._lines)[start - oldest :][:most]
        return lines, start + len(lines), lost and (cursor != 0 or oldest > 0)

    async def newer(self, cursor: int) -> None:
        """Wait for a line after `cursor`; the caller owns the deadline."""
        self._token = trio.lowlevel.current_trio_token()
        while self._last <= cursor:
            await self._changed.wait()


#: This process' log. `set_up` fills it.
ring = Ring()


def set_up(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Configure structlog and the standard library's logging, once, at start. Logs go to stderr."""
    out = stream or sys.stderr
    ring.most = settings.lines
    level = _LEVELS[settings.level]
    console = settings.format == "console" or (settings.format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        blot,
    ]
    render: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), sort_keys=False, pad_event_to=0)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    )
    structlog.configure(
        processors=[_with_name, *shared, keep, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Factory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, keep, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak up only when something is wrong: their "info" is a line per request.
    root.setLevel(max(level, logging.WARNING))


def blot(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Blot secrets out of every value, however deep."""
    return {key: "***" if _SECRET_KEYS.search(key) and value else _clean(value) for key, value in event.items()}


def keep(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Put the event into the ring, as one plain line."""
    ring.add(plain(event))
    return event


def plain(event: Pairs) -> str:
    """An event as a line: time, level, what happened, then the rest as key=value."""
    first = [str(event.get("timestamp", "")), f"{event.get('level', ''):<7}", str(event.get("event", ""))]
    rest = [
        f"{key}={value if isinstance(value, int | float) else _quoted(str(value))}"
        for key, value in event.items()
        if key not in ("timestamp", "level", "event", "exception", "logger", "stack")
    ]
    trace = [str(event[key]) for key in ("stack", "exception") if event.get(key)]
    return "\n".join([" ".join([*first, *rest]), *trace])


def _clean(value: object) -> object:
    match value:
        case str():
            return redact(value)
        case dict():
            return blot(None, "", value)
        case list() | tuple():
            return [_clean(item) for item in value]
    return value


def _quoted(text: str) -> str:
    return repr(text) if not text or re.search(r"[\s=\"']", text) else text


def _with_name(logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if isinstance(logger, _Logger) and logger.name:
        event["logger"] = logger.name
    return event


class _Logger:
    """Writes whole lines, flushed; a terminal that went away is not an error of whoever logs."""

    def __init__(self, out: TextIO, name: str) -> None:
        self._out, self.name = out, name

    def msg(self, message: str) -> None:
        try:
            self._out.write(message + "\n")
            self._out.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warn = warning = error = critical = fatal = exception = failure = err = msg


class _Factory:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, *names: object) -> _Logger:
        return _Logger(self._out, str(names[0]) if names else "")


def shout(words: str) -> None:
    """A warning that nobody who looks at the start of a log can miss."""
    log = structlog.get_logger("llmgw")
    for line in ("!" * len(words), words, "!" * len(words)):
        log.warning(line)
