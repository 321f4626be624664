"""The first frame of a stream: a Register, small and in time, or nothing comes of it (A3)."""

from __future__ import annotations

import trio

from llmgw.plane.goodbye import refusal
from llmgw.wire.agent import Register
from llmgw.wire.codec import MOST_BYTES_STRANGER, Broken, Unknown, agent_codec
from llmgw.wire.control import tag_of
from llmgw.wire.stream import Frames


async def first_register(frames: Frames, within: float) -> Register:
    """The first frame, which must be a Register (A3). Raises Ended with the reason, or Closed."""
    data = b""
    with trio.move_on_after(within) as scope:
        data = await frames.receive()
    if scope.cancelled_caught:
        raise refusal("protocol", f"no Register within {within:g} s")
    if len(data) > MOST_BYTES_STRANGER:
        raise refusal(
            "protocol", f"the first frame has {len(data)} bytes; before a Register {MOST_BYTES_STRANGER} are allowed"
        )
    try:
        message = agent_codec.decode(data)
    except Broken as error:
        raise refusal("protocol", f"the first frame is not a Register: {error}") from None
    if not isinstance(message, Register):
        kind = message.tag if isinstance(message, Unknown) else tag_of(message)
        raise refusal("protocol", f"the first frame must be a Register, not {kind!r}")
    if not usable_id(message.node):
        raise refusal("identity", f"{message.node!r} is no usable node id: 1 to 253 of letters, digits, '.', '_', '-'")
    return message


def usable_id(node: str) -> bool:
    """Whether a node may be called so: a name that can stand in a certificate, a path and a key of the store."""
    return 0 < len(node) <= 253 and node[0].isalnum() and all(c.isascii() and (c.isalnum() or c in "._-") for c in node)
