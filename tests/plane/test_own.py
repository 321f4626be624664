from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw import pki
from llmgw.errors import LlmgwError
from llmgw.pki import DAY, Role
from llmgw.plane.certs import Authority
from llmgw.plane.init import init
from llmgw.plane.own import ADMIN, SERVER, Own, load_ca, machine_hosts, server_name
from llmgw.plane.store.memory import MemoryStore
from tests.fakes.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def own(tmp_path: Path, clock: Clock) -> Own:
    init(tmp_path, wall=clock)
    authority = Authority(load_ca(tmp_path), MemoryStore(), clock)
    return Own(tmp_path, authority, "east", ("localhost", "127.0.0.1"), clock)


def serial(own: Own, file: str = SERVER) -> str:
    return pki.peer(pki.read_certificate((own.directory / file).read_bytes(), file)).serial


async def test_what_init_made_is_kept_and_known(own: Own) -> None:
    before = serial(own), serial(own, ADMIN)
    await own.freshen()
    assert (serial(own), serial(own, ADMIN)) == before
    assert {found.serial for found in own.authority.list()} == set(before)


async def test_the_planes_own_certificates_are_renewed_at_two_thirds_of_their_life(own: Own, clock: Clock) -> None:
    before = serial(own), serial(own, ADMIN)
    clock.forward(200 * DAY)
    await own.freshen()
    assert (serial(own), serial(own, ADMIN)) == before
    clock.forward(70 * DAY)
    await own.freshen()
    assert not {serial(own), serial(own, ADMIN)} & set(before)
    leaf = pki.read_certificate(own.server.read_bytes(), SERVER)
    assert pki.verify(leaf, own.authority.ca.certificate, now=clock(), role=Role.PLANE).not_after == clock() + 365 * DAY


async def test_a_name_that_was_added_makes_a_new_certificate(own: Own, clock: Clock) -> None:
    before = serial(own)
    more = Own(own.directory, own.authority, own.name, (*own.hosts, "gw.example"), clock)
    await more.freshen()
    assert serial(own) != before
    assert "gw.example" in pki.hosts(pki.read_certificate(own.server.read_bytes(), SERVER))


async def test_a_file_that_was_lost_or_broken_is_made_anew(own: Own) -> None:
    own.server.write_text("nonsense")
    await own.freshen()
    first = serial(own)
    own.server.unlink()
    await own.freshen()
    assert serial(own) != first


async def test_an_administrators_certificate_that_was_removed_stays_away(own: Own) -> None:
    (own.directory / ADMIN).unlink()
    await own.freshen()
    assert not (await trio.Path(own.directory / ADMIN).exists())


async def test_a_revoked_administrator_is_refused_and_gets_a_new_certificate_on_this_machine_only(own: Own) -> None:
    await own.freshen()
    old = pki.peer(pki.read_certificate((own.directory / ADMIN).read_bytes(), ADMIN))
    await own.authority.revoke("admin", "laptop lost")
    assert "laptop lost" in own.authority.refused(old)
    await own.freshen()
    new = pki.peer(pki.read_certificate((own.directory / ADMIN).read_bytes(), ADMIN))
    assert own.authority.refused(new) == ""


async def test_certificates_are_looked_at_again_and_nodes_that_do_not_renew_are_named(
    own: Own, clock: Clock, autojump_clock: MockClock
) -> None:
    await own.authority.issue("gpu-01", pki.make_request(pki.make_key()))
    before = serial(own)
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.run)
            await wait_all_tasks_blocked()
            clock.forward(25 * DAY)
            await trio.sleep(3601)
            clock.forward(250 * DAY)
            await trio.sleep(3601)
            nursery.cancel_scope.cancel()
    assert "the certificate of gpu-01 expires in 5d and was not renewed" in [entry["event"] for entry in logs]
    assert serial(own) != before


async def test_a_disk_that_is_full_is_told_and_tried_again(own: Own, clock: Clock, autojump_clock: MockClock) -> None:
    clock.forward(300 * DAY)
    own.server.unlink()
    own.server.mkdir()
    (own.server / "in-the-way").write_text("")
    with pytest.raises(LlmgwError, match="cannot write"):
        await own.freshen()
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.run)
            await trio.sleep(3601)
            (own.server / "in-the-way").unlink()
            own.server.rmdir()
            await trio.sleep(3601)
            nursery.cancel_scope.cancel()
    assert any(entry["event"] == "own certificate not renewed" for entry in logs)
    assert serial(own)


def test_this_machine_is_reached_by_loopback_and_what_was_added() -> None:
    found = machine_hosts(["GW.example", "fd00::0001"])
    assert {"localhost", "127.0.0.1", "::1", "gw.example", "fd00::1"} <= set(found)
    assert not any(host.startswith(("fe80:", "169.254.")) for host in found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("east", "plane-east"),
        ("Ost Büro", "plane-Ost-B-ro"),
        ("", "plane"),
        ("...", "plane"),
        ("x" * 80, "plane-" + "x" * 56),
    ],
)
def test_any_plane_name_makes_a_name_for_its_certificate(name: str, expected: str) -> None:
    assert server_name(name) == expected
    assert pki.check_name(server_name(name))
