from __future__ import annotations

import itertools
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock, memory_stream_pair

from llmgw import pki, tls
from llmgw.errors import BadInput, LlmgwError, NotFound, Refused
from llmgw.node.identity import CA, IDENTITY, PENDING, Identity, pending_request, renewals, store
from llmgw.pki import DAY, NODE_LIFE, Role
from llmgw.wire.agent import Renew
from llmgw.wire.control import Renewed

NODE = "gpu-01"


class Signer:
    """A CA that signs what it is sent."""

    def __init__(self, now: float) -> None:
        self.ca = pki.make_ca("llmgw test", now - 20 * DAY)

    def sign(self, csr: str, now: float, *, name: str = NODE, life: float = NODE_LIFE) -> str:
        return pki.to_pem(self.ca.issue(pki.requested_key(csr), name, Role.NODE, now=now, life=life))

    def identity(self, directory: Path, now: float) -> Identity:
        """One that was made at `now`."""
        leaf = pki.read_certificate(self.sign(pending_request(directory), now), "x")
        store(directory, leaf, self.ca.certificate, NODE, now)
        return Identity.load(directory)


@pytest.fixture
def signer() -> Signer:
    return Signer(time.time())


@pytest.fixture
def identity(signer: Signer, tmp_path: Path) -> Identity:
    return signer.identity(tmp_path, time.time())


def test_a_machine_that_has_not_joined_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"identity.pem is missing .* `llmgw-node join URL --token TOKEN`"):
        Identity.load(tmp_path)


@pytest.mark.parametrize("file", [IDENTITY, CA])
def test_a_file_that_was_cut_off_is_named(identity: Identity, file: str) -> None:
    path = identity.directory / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadInput, match=rf"{file} .*(cannot be|no certificate)"):
        identity.context()


def test_the_key_is_private_and_swapped_in_together_with_its_certificate(identity: Identity, signer: Signer) -> None:
    before = (identity.directory / IDENTITY).read_bytes()
    csr = identity.request()
    assert (identity.directory / IDENTITY).read_bytes() == before
    assert stat.S_IMODE((identity.directory / PENDING).stat().st_mode) == 0o600
    identity.accept(signer.sign(csr, time.time()), time.time())
    after = (identity.directory / IDENTITY).read_bytes()
    assert after != before
    assert stat.S_IMODE((identity.directory / IDENTITY).stat().st_mode) == 0o600
    assert pki.read_key(after, "x").public_key() == pki.requested_key(csr)
    assert not (identity.directory / PENDING).exists()
    identity.context()


def test_a_request_that_is_repeated_is_for_the_same_key(identity: Identity) -> None:
    assert pki.requested_key(identity.request()) == pki.requested_key(identity.request())


def test_certificates_that_are_not_ours_are_refused_and_the_old_one_stays(identity: Identity, signer: Signer) -> None:
    now = time.time()
    before = (identity.directory / IDENTITY).read_bytes()
    csr = identity.request()
    wrong = {
        "for another key": signer.sign(pki.make_request(pki.make_key()), now),
        "not signed by this fleet's CA": Signer(now).sign(csr, now),
        "names 'gpu-02', not 'gpu-01'": signer.sign(csr, now, name="gpu-02"),
        "expired": signer.sign(csr, now - 2 * DAY, life=DAY),
        "not valid before": signer.sign(csr, now + 2 * DAY),
        "holds no certificate": "nonsense",
    }
    for words, pem in wrong.items():
        with pytest.raises(LlmgwError, match=words):
            identity.accept(pem, now)
        assert (identity.directory / IDENTITY).read_bytes() == before
    identity.accept(signer.sign(csr, now), now)


def test_what_is_on_disk_counts_at_the_next_connection(identity: Identity, signer: Signer) -> None:
    """TL02: files that were replaced while a stream was open."""
    old = identity.peer.serial
    signer.identity(identity.directory, time.time())
    assert identity.peer.serial == old
    identity.context()
    assert identity.peer.serial != old


def test_an_operator_hears_of_a_certificate_that_was_not_renewed(identity: Identity) -> None:
    now = time.time()
    assert identity.problem(now) == ""
    assert identity.problem(now + 25 * DAY).endswith("and was not renewed")
    assert "expired at" in identity.problem(now + 31 * DAY)
    assert "set the clock" in identity.problem(now - DAY)


class Wall:
    """A wall clock that goes with trio's."""

    def __init__(self, at_zero: float) -> None:
        self.at_zero = at_zero

    def __call__(self) -> float:
        return self.at_zero + trio.current_time()


class Stream:
    """A stream on which renewals run: what was asked, and a way to answer."""

    def __init__(self, identity: Identity, wall: Callable[[], float]) -> None:
        self.asked: list[tuple[float, str]] = []
        self._said, self.heard = trio.open_memory_channel[Renew](10)
        self.reply, replies = trio.open_memory_channel[Renewed](10)
        self.run = lambda: renewals(identity, self._said.send_nowait, replies, wall=wall, roll=lambda: 0.5)

    async def next(self) -> str:
        return (await self.heard.receive()).csr


async def test_a_certificate_is_renewed_at_two_thirds_of_its_life_and_again(
    identity: Identity, signer: Signer, autojump_clock: MockClock
) -> None:
    wall = Wall(time.time() - trio.current_time())
    stream = Stream(identity, wall)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        for _ in range(2):
            began = wall()
            csr = await stream.next()
            assert NODE_LIFE * 0.66 <= wall() - began <= NODE_LIFE * 0.73
            await stream.reply.send(Renewed(certificate=signer.sign(csr, wall())))
            await trio.testing.wait_all_tasks_blocked()
            assert identity.peer.not_after == pytest.approx(wall() + NODE_LIFE, abs=2)
        nursery.cancel_scope.cancel()


async def test_a_refusal_is_tried_again_later_and_said(
    identity: Identity, signer: Signer, autojump_clock: MockClock
) -> None:
    wall = Wall(time.time() - trio.current_time())
    stream = Stream(identity, wall)
    serial = identity.peer.serial
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            gaps = []
            for _ in range(4):
                csr = await stream.next()
                gaps.append(wall())
                await stream.reply.send(Renewed(error="the store is full"))
            assert pki.requested_key(csr) == pki.requested_key(await stream.next())
            await stream.reply.send(Renewed(certificate=signer.sign(csr, wall())))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    waits = [later - earlier for earlier, later in itertools.pairwise(gaps)]
    assert waits == sorted(waits)
    assert 30 <= waits[0] < 3600
    assert [entry["error"] for entry in logs if entry["log_level"] == "warning"] == ["the store is full"] * 4
    assert identity.peer.serial != serial


async def test_an_answer_that_never_comes_or_comes_late_is_no_harm(
    identity: Identity, signer: Signer, autojump_clock: MockClock
) -> None:
    wall = Wall(time.time() - trio.current_time())
    stream = Stream(identity, wall)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await stream.next()
        await trio.sleep(70)  # past its deadline
        await stream.reply.send(Renewed(error="late"))
        csr = await stream.next()
        await stream.reply.send(Renewed(certificate=signer.sign(csr, wall())))
        await trio.testing.wait_all_tasks_blocked()
        assert identity.peer.not_after == pytest.approx(wall() + NODE_LIFE, abs=2)
        nursery.cancel_scope.cancel()


async def test_renewals_end_with_their_stream(identity: Identity, autojump_clock: MockClock) -> None:
    stream = Stream(identity, Wall(time.time() - trio.current_time()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await stream.next()
        stream.reply.close()


async def test_a_renewal_keeps_the_stream_and_the_next_one_shows_the_new_certificate(
    identity: Identity, signer: Signer, tmp_path: Path
) -> None:
    """Real TLS over memory: the open stream goes on while the files change under it."""
    ca = tmp_path / "plane-ca.pem"
    ca.write_text(signer.ca.pem)
    key = pki.make_key()
    leaf = signer.ca.issue(key.public_key(), "plane", Role.PLANE, now=time.time(), life=DAY, hosts=["plane"])
    (tmp_path / "server.pem").write_text(pki.key_to_pem(key) + pki.to_pem(leaf))
    context = tls.server_context(ca, tmp_path / "server.pem")

    first, plane_first = await _connected(identity.context(), context)
    old = identity.peer.serial
    identity.accept(signer.sign(identity.request(), time.time()), time.time())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.send_all, b"still here")
        assert await plane_first.receive_some(100) == b"still here"
    seen_first = tls.peer_of(plane_first)
    _, plane_second = await _connected(identity.context(), context)
    seen_second = tls.peer_of(plane_second)
    assert seen_first is not None
    assert seen_second is not None
    assert (seen_first.name, seen_first.serial) == (NODE, old)
    assert (seen_second.name, seen_second.serial) == (NODE, identity.peer.serial)
    assert seen_second.serial != old


async def _connected(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[trio.SSLStream[trio.abc.Stream], trio.SSLStream[trio.abc.Stream]]:
    one, other = memory_stream_pair()
    near: trio.SSLStream[trio.abc.Stream] = trio.SSLStream(one, client, server_hostname="plane")
    far: trio.SSLStream[trio.abc.Stream] = trio.SSLStream(other, server, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.do_handshake)
        nursery.start_soon(far.do_handshake)
    return near, far


def test_a_certificate_for_another_name_is_never_stored(signer: Signer, tmp_path: Path) -> None:
    leaf = pki.read_certificate(signer.sign(pending_request(tmp_path), time.time(), name="gpu-02"), "x")
    with pytest.raises(Refused, match="names 'gpu-02', not 'gpu-01'"):
        store(tmp_path, leaf, signer.ca.certificate, NODE, time.time())
    assert not (tmp_path / IDENTITY).exists()
