"""Frames to bytes and back, with the rules for peers of another version (A12) and size (A13)."""

from __future__ import annotations

from typing import Generic, TypeVar, get_args

import msgspec

from llmgw.wire.agent import AgentMessage
from llmgw.wire.control import ControlMessage

M = TypeVar("M")
T = TypeVar("T")

#: The largest frame from a verified agent, joined from its parts, in bytes.
MOST_BYTES = 64 << 20
#: The largest frame before a Register was accepted.
MOST_BYTES_STRANGER = 64 << 10
#: Frames longer than this are sent as parts.
PART_BYTES = 128 << 10

_encoder = msgspec.msgpack.Encoder()


class Broken(Exception):
    """Bytes that no version of the protocol sends: the peer is broken or is not one of ours."""


class Unknown:
    """A frame of a kind this version does not know: to be counted and ignored (A12)."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


class _Tag(msgspec.Struct):
    type: str | None = None


_tag = msgspec.msgpack.Decoder(_Tag)


def encode(frame: object) -> bytes:
    """A frame or a reply's value as MessagePack."""
    return _encoder.encode(frame)


def decode_value(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """A reply's value. Raises Broken when it is not of that kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Broken(f"not a {kind.__name__}: {error}") from None


class Codec(Generic[M]):
    """Decodes one direction's frames."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self.tags = frozenset(str(tag) for kind in get_args(union) if (tag := kind.__struct_config__.tag) is not None)

    def decode(self, data: bytes | memoryview) -> M | Unknown:
        """One frame. Raises Broken for anything that is not a frame of this direction.

        An unknown tag is not an error: a newer peer says something we need not understand.
        """
        try:
            return self._decoder.decode(data)
        except RecursionError:
            raise Broken("nested too deep") from None
        except UnicodeDecodeError as error:
            raise Broken(f"not text where text is due: {error}") from None
        except msgspec.MsgspecError as error:
            problem = error
        try:
            tag = _tag.decode(data).type
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise Broken(f"not a frame: {problem}") from None
        if tag is None:
            raise Broken("a frame without a kind")
        if tag in self.tags:
            raise Broken(f"a {tag!r} frame that cannot be read: {problem}")
        return Unknown(tag)


agent_codec: Codec[AgentMessage] = Codec(AgentMessage)
control_codec: Codec[ControlMessage] = Codec(ControlMessage)
