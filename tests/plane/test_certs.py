from __future__ import annotations

import attrs
import pytest
import trio

from llmgw import pki
from llmgw.errors import BadInput, Conflict, NotFound
from llmgw.pki import DAY, NODE_LIFE, Peer, Role
from llmgw.plane.certs import MOST, Authority, expiry_warning
from llmgw.plane.store.memory import MemoryStore
from tests.fakes.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def ca() -> pki.Authority:
    return pki.make_ca("llmgw test", Clock().now)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def authority(ca: pki.Authority, store: MemoryStore, clock: Clock) -> Authority:
    return Authority(ca, store, clock)


def request() -> str:
    return pki.make_request(pki.make_key())


async def joined(authority: Authority, node: str = "gpu-01") -> Peer:
    return pki.peer(pki.read_certificate(await authority.issue(node, request()), "issued"))


async def renewed(authority: Authority, peer: Peer) -> Peer:
    answer = await authority.renew(peer.name, request(), peer)
    assert not answer.error
    return pki.peer(pki.read_certificate(answer.certificate, "renewed"))


async def test_what_was_issued_is_welcome(authority: Authority, clock: Clock) -> None:
    peer = await joined(authority)
    assert (peer.name, peer.role, peer.not_after) == ("gpu-01", "node", clock() + NODE_LIFE)
    assert authority.refused(peer) == ""


async def test_a_renewal_gives_a_new_certificate_and_leaves_the_old_one_good(
    authority: Authority, clock: Clock
) -> None:
    old = await joined(authority)
    clock.forward(20 * DAY)
    new = await renewed(authority, old)
    assert new.not_after == clock() + NODE_LIFE
    assert new.serial != old.serial
    assert (authority.refused(old), authority.refused(new)) == ("", "")
    assert [(found.serial, found.renews) for found in authority.list()] == [(new.serial, old.serial), (old.serial, "")]


async def test_a_renewal_over_a_stream_that_was_opened_with_an_older_certificate_succeeds(
    authority: Authority, clock: Clock
) -> None:
    """A stream shows the certificate it was opened with for as long as it lasts."""
    first = await joined(authority)
    clock.forward(20 * DAY)
    second = await renewed(authority, first)
    clock.forward(5 * DAY)
    third = await renewed(authority, first)
    assert authority.refused(second) == ""
    assert authority.refused(third) == ""


async def test_a_revoked_node_is_refused_at_once_with_every_certificate_it_holds(
    authority: Authority, clock: Clock
) -> None:
    old = await joined(authority)
    new = await renewed(authority, old)
    assert len(await authority.revoke("gpu-01", "stolen")) == 2
    for peer in (old, new):
        assert authority.refused(peer) == (
            "the certificate of gpu-01 was revoked at 2026-01-01 00:00:00 UTC (stolen): join again"
        )
    assert "was revoked" in (await authority.renew("gpu-01", request(), new)).error


async def test_revoking_is_remembered_over_a_restart(
    authority: Authority, ca: pki.Authority, store: MemoryStore, clock: Clock
) -> None:
    peer = await joined(authority)
    other = await joined(authority, "gpu-02")
    await authority.revoke("gpu-01")
    again = Authority(ca, store, clock)
    await again.load()
    assert "was revoked" in again.refused(peer)
    assert again.refused(other) == ""


async def test_a_certificate_that_the_records_do_not_hold_is_refused(authority: Authority, ca: pki.Authority) -> None:
    made = ca.issue(pki.make_key().public_key(), "gpu-09", Role.NODE, now=Clock().now, life=DAY)
    assert authority.refused(pki.peer(made)).startswith(
        "gpu-09 was deleted here, or this plane's state is an older copy"
    )
    assert (await authority.renew("gpu-09", request(), pki.peer(made))).error.startswith("gpu-09 was deleted here")


async def test_revoking_a_name_that_holds_nothing_names_the_nearest_one(authority: Authority) -> None:
    await joined(authority)
    with pytest.raises(NotFound, match="gpu-1 has no certificate: did you mean gpu-01"):
        await authority.revoke("gpu-1")


async def test_a_name_that_is_taken_cannot_be_joined_again(authority: Authority) -> None:
    await joined(authority)
    with pytest.raises(Conflict, match=r"gpu-01 has joined already .* --replace"):
        await authority.issue("gpu-01", request())


async def test_replacing_revokes_what_the_name_held(authority: Authority) -> None:
    old = await joined(authority)
    new = pki.peer(pki.read_certificate(await authority.issue("gpu-01", request(), replace=True), "x"))
    assert "replaced by a new join" in authority.refused(old)
    assert authority.refused(new) == ""


async def test_a_name_is_free_again_when_revoked_or_expired(authority: Authority, clock: Clock) -> None:
    await joined(authority)
    await authority.revoke("gpu-01")
    await joined(authority)
    clock.forward(NODE_LIFE + 1)
    assert (await joined(authority)).not_after > clock()


async def test_a_node_cannot_renew_for_another(authority: Authority) -> None:
    peer = await joined(authority)
    await joined(authority, "gpu-02")
    answer = await authority.renew("gpu-02", request(), peer)
    assert answer.error == "the certificate of 'gpu-01' cannot renew that of 'gpu-02'"
    admin = attrs.evolve(peer, role="admin")
    assert "cannot renew" in (await authority.renew("gpu-01", request(), admin)).error


async def test_a_request_that_cannot_be_read_gets_an_answer_in_words(authority: Authority) -> None:
    peer = await joined(authority)
    assert "cannot be read" in (await authority.renew("gpu-01", "nonsense", peer)).error
    with pytest.raises(BadInput, match="cannot be read"):
        await authority.issue("gpu-02", "nonsense")


async def test_two_planes_on_one_store_do_not_both_give_a_name_away(
    ca: pki.Authority, store: MemoryStore, clock: Clock
) -> None:
    outcomes: list[str] = []

    async def come(authority: Authority) -> None:
        try:
            await authority.issue("gpu-01", request())
        except Conflict:
            outcomes.append("conflict")
        else:
            outcomes.append("issued")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(come, Authority(ca, store, clock))
    assert sorted(outcomes) == ["conflict", "conflict", "issued"]


async def test_an_expired_certificate_is_forgotten_and_a_revoked_one_not_before_it_expires(
    authority: Authority, clock: Clock
) -> None:
    await joined(authority)
    revoked = await joined(authority, "gpu-02")
    await authority.revoke("gpu-02")
    for number in range(20):
        await joined(authority, f"other-{number}")
    assert "was revoked" in authority.refused(revoked)
    clock.forward(NODE_LIFE + 2 * DAY)
    await joined(authority, "gpu-03")
    assert [found.name for found in authority.list()] == ["gpu-03"]


async def test_a_node_that_renews_without_end_does_not_fill_the_store(authority: Authority, store: MemoryStore) -> None:
    peer = await joined(authority)
    for _ in range(MOST + 5):
        peer = await renewed(authority, peer)
    assert len(authority.list()) == MOST
    assert len((await store.load("certs/")).values) == MOST


async def test_states_and_warnings_follow_the_time(authority: Authority, clock: Clock) -> None:
    await joined(authority)
    found = authority.list()[0]
    assert [found.state(clock() + days * DAY) for days in (1, 22, 31)] == ["live", "renewal-due", "expired"]
    assert expiry_warning(authority.list(), clock() + 10 * DAY) == ()
    (warning,) = expiry_warning(authority.list(), clock() + 25 * DAY)
    assert warning == "the certificate of gpu-01 expires in 5d and was not renewed"
