"""How the plane ends a stream, or never begins one: with words that the agent logs (A2-A4)."""

from __future__ import annotations

import trio

from llmgw.wire.codec import encode
from llmgw.wire.control import Goodbye
from llmgw.wire.stream import Closed, Frames

#: WebSocket close codes of our own range, by the goodbye's code.
CLOSE_CODES = {
    "not-leader": 4001,
    "superseded": 4002,
    "identity": 4003,
    "revoked": 4004,
    "protocol": 4005,
    "silent": 4006,
    "stopping": 1001,
}


class Ended(Exception):
    """The plane ends a stream, with words the agent logs."""

    def __init__(self, goodbye: Goodbye) -> None:
        super().__init__(goodbye.reason)
        self.goodbye = goodbye


def refusal(code: str, reason: str, *, retry_after: float = 0.0, leader: str = "") -> Ended:
    return Ended(Goodbye(code=code, reason=reason, retry_after=retry_after, leader=leader))


async def say_goodbye(frames: Frames, goodbye: Goodbye, within: float = 2.0) -> None:
    """Send the last frame and close with its reason; bounded, and shielded since the stream is being torn down."""
    with trio.move_on_after(within, shield=True):
        try:
            await frames.send(encode(goodbye))
        except Closed:
            return
        await frames.aclose(CLOSE_CODES.get(goodbye.code, 4000), goodbye.reason)
