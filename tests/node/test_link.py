"""How an agent keeps coming back (C1, RC01-RC05)."""

from __future__ import annotations

import random
import ssl
from functools import partial
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from llmgw.backoff import Backoff
from llmgw.errors import BadInput
from llmgw.node.link import MOST_RETRY_AFTER, Address, CannotDial, address, dial, keep, why
from llmgw.wire.control import Goodbye
from llmgw.wire.stream import Frames


@pytest.mark.parametrize("roll", [0.0, 0.5, 0.999])
def test_delays_double_to_the_cap_with_full_jitter(roll: float) -> None:
    backoff = Backoff()
    assert [backoff.delay(n, roll) for n in range(8)] == [roll * bound for bound in (1, 2, 4, 8, 16, 30, 30, 30)]
    assert backoff.delay(10**9, roll) == roll * 30


def test_the_count_begins_again_after_a_stream_that_held() -> None:
    backoff = Backoff()
    assert backoff.after(7, 119.0) == 8
    assert backoff.after(7, 120.0) == 0
    assert backoff.after(-1, 0.0) == 0


def test_a_retry_after_is_waited_for_and_jitter_comes_on_top() -> None:
    assert Backoff().delay(0, 0.5, retry_after=10) == 10.5
    assert Backoff(base=1e-9).delay(0, 0.5, retry_after=-1) >= 0


def test_a_fleet_never_comes_back_in_lockstep() -> None:
    # 1,000 agents whose plane is away for a minute: tries per second stay flat.
    generator, backoff, tries = random.Random(1), Backoff(), [0] * 60
    for _ in range(1000):
        at, attempt = 0.0, 0
        while (at := at + backoff.delay(attempt, generator.random())) < 60:
            tries[int(at)] += 1
            attempt += 1
    steady = tries[20:]
    assert max(steady) / (sum(steady) / len(steady)) < 3
    assert tries[0] > 0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("plane:7443", "is no address of a plane"),
        ("https://plane", "is no address of a plane"),
        ("wss://", "is no address of a plane"),
        ("wss://plane:99999", "is no address of a plane"),
        ("ws://plane:7443", "is not encrypted"),
    ],
)
def test_a_bad_address_says_how_to_write_it(url: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        address(url)


def test_addresses_have_the_agents_port_by_default() -> None:
    assert address("wss://plane") == Address("plane", 7443, True)
    assert str(address("wss://[::1]:1")) == "wss://[::1]:1"
    assert address("wss://[::1]").authority == "[::1]:7443"
    assert address("ws://127.0.0.1:7") == Address("127.0.0.1", 7, False)


@pytest.mark.real
async def test_a_plane_that_is_not_there_is_an_error_in_words() -> None:
    with pytest.raises(CannotDial, match=r"ws://127\.0\.0\.1:1 cannot be reached"):
        async with dial(Address("127.0.0.1", 1, False), None):
            raise AssertionError("nothing listens there")


@pytest.mark.real
async def test_what_is_raised_inside_the_stream_comes_out_bare() -> None:
    async def web(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, web, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(CannotDial, match="answered 404 and opened no stream"):
            async with dial(Address("127.0.0.1", port, False), None):
                raise AssertionError("that is no plane")
        nursery.cancel_scope.cancel()


def test_an_untrusted_certificate_is_named_and_a_wrong_clock_is_thought_of() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
    error.verify_message, error.verify_code = "certificate is not yet valid", 9
    broken = trio.BrokenResourceError()
    broken.__cause__ = error
    words = why(ExceptionGroup("", [broken]), Address("plane", 7443, True))
    assert "not valid yet" in words
    assert "clock" in words


@pytest.mark.parametrize("asked", [1e9, float("inf"), float("nan"), -5.0])
async def test_no_plane_can_send_an_agent_away_for_ever(
    asked: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    async def attempt(to: Address, context: object, carry: object) -> Goodbye:
        await trio.lowlevel.checkpoint()
        tried.append(trio.current_time())
        return Goodbye(code="stopping", reason="the plane stops", retry_after=asked)

    async def carry(frames: Frames) -> Goodbye:
        raise AssertionError("no stream is opened here")

    monkeypatch.setattr("llmgw.node.link._try", attempt)
    with trio.move_on_after(2000):
        await keep([address("wss://a")], lambda: None, carry)
    assert len(tried) >= 3
    assert all(later - earlier <= MOST_RETRY_AFTER + 30 for earlier, later in pairwise(tried))


async def test_the_leader_that_a_standby_names_is_tried_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def attempt(to: Address, context: object, carry: object) -> Goodbye:
        await trio.lowlevel.checkpoint()
        tried.append(str(to))
        if str(to) == "wss://a:7443":
            return Goodbye(code="not-leader", reason="stands by", leader="wss://c:7443")
        return Goodbye(code="closed", reason="gone")

    async def carry(frames: Frames) -> Goodbye:
        raise AssertionError("no stream is opened here")

    monkeypatch.setattr("llmgw.node.link._try", attempt)
    with trio.move_on_after(60):
        await keep([address("wss://a"), address("wss://b")], lambda: None, carry, roll=lambda: 0.5)
    assert tried[:4] == ["wss://a:7443", "wss://c:7443", "wss://b:7443", "wss://a:7443"]
