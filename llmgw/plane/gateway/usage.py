"""Token counts, read from what engines answer. What is passed on to the client is not touched, with one exception.

Where the client did not ask for the counts of its stream, the gateway asks, and keeps the one extra event that
brings them from the client. An event that carries content, a name (`event:`) or an error is never kept back, whatever
else is in it. Other answers than completions (`/v1/messages`, `/v1/responses`) name their counts otherwise, and say
them within the message or response that they are of.
"""

from __future__ import annotations

import re

import attrs
import msgspec

#: Past this an event or a body is passed on uncounted: no engine writes a usage object that late.
MOST_BYTES = 4 << 20

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@attrs.frozen
class Usage:
    prompt: int
    completion: int


class _Counts(msgspec.Struct):
    prompt_tokens: object = 0
    completion_tokens: object = 0
    input_tokens: object = 0
    output_tokens: object = 0


_NULL = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = _NULL
    message: msgspec.Raw = _NULL
    response: msgspec.Raw = _NULL
    choices: object = None
    error: object = None


_answer = msgspec.json.Decoder(_Answer)
_counts = msgspec.json.Decoder(_Counts)


def _count(*values: object) -> int:
    return max(value if isinstance(value, int) and not isinstance(value, bool) else 0 for value in (*values, 0))


def usage_in(document: bytes) -> tuple[Usage | None, bool]:
    """The usage in one JSON document, and whether the document has anything else to say: choices, or an error.

    Anything may be missing or odd.
    """
    try:
        answer = _answer.decode(document)
        says = bool(answer.choices or answer.error)
        for inner in (answer.message, answer.response):
            if not bytes(answer.usage).startswith(b"{") and bytes(inner).startswith(b"{"):
                answer = _answer.decode(inner)
        if not bytes(answer.usage).startswith(b"{"):
            return None, says
        counts = _counts.decode(answer.usage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, True
    return (
        Usage(
            _count(counts.prompt_tokens, counts.input_tokens), _count(counts.completion_tokens, counts.output_tokens)
        ),
        says,
    )


class StreamMeter:
    """Reads the events of a stream as they pass. `strip`: keep the event with nothing but usage from the client."""

    def __init__(self, *, strip: bool) -> None:
        self.usage: Usage | None = None
        self._strip = strip
        self._partial = b""
        self._blind = False

    def feed(self, data: bytes) -> bytes:
        """What to pass on now. Without `strip` that is `data` itself, at once."""
        if self._blind:
            return data
        buffer = self._partial + data
        passed: list[bytes] = []
        start = 0
        # An event ends at an empty line; the search goes back a little, for that line may be split.
        for end in _EVENT_END.finditer(buffer, max(0, len(self._partial) - 3)):
            event = buffer[start : end.end()]
            start = end.end()
            if not (self._usage_only(event) and self._strip):
                passed.append(event)
        self._partial = buffer[start:]
        if len(self._partial) > MOST_BYTES:
            self._blind = True
            passed.append(self.rest())
        return b"".join(passed) if self._strip else data

    def rest(self) -> bytes:
        """The bytes still kept when the stream ends in the middle of an event."""
        rest, self._partial = self._partial, b""
        return rest if self._strip else b""

    def _usage_only(self, event: bytes) -> bool:
        if b'"usage"' not in event:
            return False
        lines = [line for line in re.split(rb"\r\n|\n|\r", event) if line]
        document = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        usage, says = usage_in(document)
        if usage is None:
            return False
        before = self.usage or usage
        self.usage = Usage(max(before.prompt, usage.prompt), max(before.completion, usage.completion))
        return not says and all(line.startswith(b"data:") for line in lines)


class BodyMeter:
    """Reads a whole JSON answer as it passes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size <= MOST_BYTES:
            self._pieces.append(data)
        return data

    def rest(self) -> bytes:
        return b""

    @property
    def usage(self) -> Usage | None:
        return usage_in(b"".join(self._pieces))[0] if self._size <= MOST_BYTES else None
