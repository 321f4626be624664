"""The plane's side of a join, over frames in memory: how long it listens to a stranger, and to what."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from llmgw import pki
from llmgw.plane.certs import Authority
from llmgw.plane.joining import JOIN_WITHIN, answer_join
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.tokens import Tokens
from llmgw.wire.agent import Join, Register
from llmgw.wire.codec import MOST_BYTES_STRANGER, control_codec, encode
from llmgw.wire.control import Joined, JoinHello
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed
from tests.fakes.clock import Clock
from tests.fakes.frames import MemoryFrames, pair


@pytest.fixture(scope="module")
def ca() -> pki.Authority:
    return pki.make_ca("llmgw test", Clock().now)


class Plane:
    def __init__(self, ca: pki.Authority) -> None:
        store, clock = MemoryStore(), Clock()
        self.authority = Authority(ca, store, clock)
        self.tokens = Tokens(store, ca.fingerprint, clock)

    async def answer(self, frames: MemoryFrames) -> None:
        await answer_join(frames, "10.0.0.1", authority=self.authority, tokens=self.tokens)


async def heard(plane: Plane, *said: bytes) -> Joined:
    """What a stranger hears, after the hello, that says these frames."""
    near, far = pair()
    answers: list[Joined] = []

    async def stranger() -> None:
        assert control_codec.decode(await near.receive()) == JoinHello(ca=plane.authority.ca_pem)
        for data in said:
            await near.send(data)
        answer = control_codec.decode(await near.receive())
        assert isinstance(answer, Joined)
        answers.append(answer)
        await near.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(plane.answer, far)
        nursery.start_soon(stranger)
    return answers[0]


def a_join(token: str, node: str = "gpu-01", csr: str | None = None) -> bytes:
    csr = pki.make_request(pki.make_key()) if csr is None else csr
    return encode(Join(token=token, node=NodeId(node), csr=csr, version="0.1.0"))


async def test_a_join_is_answered_with_an_identity(ca: pki.Authority, autojump_clock: MockClock) -> None:
    plane = Plane(ca)
    text, _ = await plane.tokens.create(60)
    joined = await heard(plane, a_join(text))
    assert (joined.error, joined.node, joined.ca) == ("", "gpu-01", ca.pem)
    peer = pki.peer(pki.read_certificate(joined.certificate, "x"))
    assert (peer.name, plane.authority.refused(peer)) == ("gpu-01", "")
    assert [(token.used_by, token.used_from) for token in await plane.tokens.list()] == [("gpu-01", "10.0.0.1")]


async def test_a_stranger_who_says_nothing_is_told_so_in_time(ca: pki.Authority, autojump_clock: MockClock) -> None:
    began = trio.current_time()
    assert (await heard(Plane(ca))).error == "a Join is due within 10 s, and nothing else"
    assert trio.current_time() - began == pytest.approx(JOIN_WITHIN)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x91" * 5000,
        encode(Register(node=NodeId("gpu-01"), version="0.1.0")),
        encode({"type": "from-the-future"}),
        encode(Join(token="x" * MOST_BYTES_STRANGER, node=NodeId("gpu-01"), csr="")),
    ],
)
async def test_a_stranger_who_says_anything_else_is_refused_at_once(
    ca: pki.Authority, autojump_clock: MockClock, data: bytes
) -> None:
    began = trio.current_time()
    assert (await heard(Plane(ca), data)).error == "a Join is due within 10 s, and nothing else"
    assert trio.current_time() - began < JOIN_WITHIN


async def test_each_refusal_has_its_words_and_spends_no_token(ca: pki.Authority, autojump_clock: MockClock) -> None:
    plane = Plane(ca)
    text, token = await plane.tokens.create(60, node="gpu-01")
    cases = {
        "'' cannot be a name": a_join(text, ""),
        "'gpu 01' cannot be a name": a_join(text, "gpu 01"),
        "the certificate request cannot be read": a_join(text, csr="nonsense"),
        "this is not a join token": a_join("nonsense"),
        "this token is not known here": a_join(f"llmgw1.{token.id}.{'x' * 43}.{'f' * 43}"),
        "this token is for gpu-01, not for gpu-02": a_join(text, "gpu-02"),
    }
    for words, data in cases.items():
        joined = await heard(plane, data)
        assert joined.error.startswith(words)
        assert (joined.certificate, joined.ca) == ("", "")
    assert [found.state(Clock().now) for found in await plane.tokens.list()] == ["open"]
    assert plane.authority.list() == ()


async def test_a_name_that_is_taken_spends_no_token(ca: pki.Authority, autojump_clock: MockClock) -> None:
    plane = Plane(ca)
    first, _ = await plane.tokens.create(60)
    second, token = await plane.tokens.create(60)
    await heard(plane, a_join(first))
    assert (await heard(plane, a_join(second))).error.startswith("gpu-01 has joined already")
    assert {found.id: found.used_at is None for found in await plane.tokens.list()}[token.id]


async def test_a_token_that_replaces_revokes_what_the_name_held(ca: pki.Authority, autojump_clock: MockClock) -> None:
    plane = Plane(ca)
    first, _ = await plane.tokens.create(60)
    old = pki.peer(pki.read_certificate((await heard(plane, a_join(first))).certificate, "x"))
    second, _ = await plane.tokens.create(60, node="gpu-01", replace=True)
    assert (await heard(plane, a_join(second))).error == ""
    assert "replaced by a new join" in plane.authority.refused(old)


async def test_a_stranger_who_leaves_takes_nothing_down(ca: pki.Authority, autojump_clock: MockClock) -> None:
    near, far = pair()
    await near.aclose()
    with pytest.raises(Closed):
        await Plane(ca).answer(far)
