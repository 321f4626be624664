"""The first frame of a stream (A3)."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from llmgw.plane.first import first_register, usable_id
from llmgw.plane.goodbye import Ended
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.codec import MOST_BYTES_STRANGER, encode
from llmgw.wire.facts import NodeId
from tests.fakes.frames import pair


async def test_silence_instead_of_a_register_is_refused(autojump_clock: MockClock) -> None:
    ours, _theirs = pair()
    with pytest.raises(Ended, match="no Register within 10 s"):
        await first_register(ours, 10)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode(Heartbeat()), "must be a Register, not 'heartbeat'"),
        (encode({"type": "later"}), "must be a Register, not 'later'"),
        (b"GET / HTTP/1.1", "not a Register"),
        (b"x" * (MOST_BYTES_STRANGER + 1), "before a Register 65536 are allowed"),
        (encode(Register(node=NodeId(""), version="1")), "no usable node id"),
        (encode(Register(node=NodeId("a/b"), version="1")), "no usable node id"),
    ],
)
async def test_anything_but_a_register_is_refused_with_a_reason(first: bytes, reason: str) -> None:
    ours, theirs = pair()
    await theirs.send(first)
    with pytest.raises(Ended, match=reason):
        await first_register(ours, 10)


def test_node_ids_are_names_that_can_stand_anywhere() -> None:
    assert usable_id("gpu-07.rack_3")
    for bad in ("", "-x", "a b", "ä", "x" * 254, "../x"):
        assert not usable_id(bad)
