"""Contexts over real TLS: who is let in, and what an operator reads when nobody is."""

from __future__ import annotations

import ssl
import time
from functools import partial
from pathlib import Path

import attrs
import pytest
import structlog
import trio
from cryptography.hazmat.primitives import serialization

from llmgw import pki, tls
from llmgw.errors import BadInput, LlmgwError, NotFound
from llmgw.pki import DAY, Peer, Role
from llmgw.tlsstream import TlsStream

pytestmark = pytest.mark.real

Secure = trio.SSLStream[trio.SocketStream]


@attrs.frozen
class Fleet:
    directory: Path
    ca: pki.Authority

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    def identity(self, name: str, role: Role, *, now: float | None = None, ca: pki.Authority | None = None) -> Path:
        key = pki.make_key()
        hosts = ("plane.example", "127.0.0.1") if role is Role.PLANE else ()
        made = (ca or self.ca).issue(key.public_key(), name, role, now=now or time.time(), life=DAY, hosts=hosts)
        path = self.directory / f"{name}.pem"
        path.write_text(pki.key_to_pem(key) + pki.to_pem(made))
        return path


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    ca = pki.make_ca("llmgw test", time.time() - 5 * DAY)
    (tmp_path / "ca.pem").write_text(ca.pem)
    return Fleet(tmp_path, ca)


async def shake(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str = "plane.example"
) -> tuple[Peer | None, Peer | None, str, str]:
    """Whom each end sees, and each one's failure in words ("": none).

    TLS 1.3: the client hears of a refusal when it reads.
    """
    one, other = trio.socket.socketpair()
    near = trio.SSLStream(trio.SocketStream(one), client, server_hostname=host)
    far = TlsStream(trio.SocketStream(other), server, server_side=True)
    words, seen = {"near": "", "far": ""}, dict[str, Peer | None]()

    async def run(which: str, stream: Secure | TlsStream, other: str) -> None:
        try:
            await stream.do_handshake()
            await stream.send_all(b"hello")
            await stream.receive_some(10)
            seen[which] = tls.peer_of(stream)
        except trio.BrokenResourceError as error:
            words[which] = tls.explain(error, other)
            if isinstance(stream, TlsStream):
                await stream.linger()
            await trio.aclose_forcefully(stream)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "near", near, "the plane")
            nursery.start_soon(run, "far", far, "the agent")
    await near.aclose()
    await far.aclose()
    return seen.get("near"), seen.get("far"), words["near"], words["far"]


async def test_both_ends_see_whom_the_other_ones_certificate_names(fleet: Fleet) -> None:
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    client = tls.client_context(fleet.ca_file, fleet.identity("gpu-01", Role.NODE))
    plane, node, *words = await shake(client, server)
    assert words == ["", ""]
    leaf = pki.read_certificate((fleet.directory / "gpu-01.pem").read_text(), "x")
    assert node == pki.peer(leaf)
    assert plane is not None
    assert (plane.name, plane.role) == ("plane", "plane")
    assert (server.minimum_version, client.minimum_version) == (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)


async def test_who_has_no_certificate_has_no_name(fleet: Fleet) -> None:
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    _, far, *words = await shake(tls.client_context(fleet.ca_file), server)
    assert words == ["", ""]
    assert far is None


async def test_a_certificate_that_nobody_verified_names_nobody(fleet: Fleet) -> None:
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    near, _, *_ = await shake(tls.unverified_context(), server)
    assert near is None


async def test_no_session_tickets_are_sent(fleet: Fleet) -> None:
    assert tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE)).num_tickets == 0


async def test_each_refusal_has_its_words(fleet: Fleet) -> None:
    """(what the client has, what the client reads, what the plane reads)"""
    now = time.time()
    other = pki.make_ca("llmgw test", now)
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    cases: list[tuple[Path, str, str]] = [
        (
            fleet.identity("expired", Role.NODE, now=now - 3 * DAY),
            "the plane says that our certificate has expired",
            "its certificate has expired by this machine's clock",
        ),
        (
            fleet.identity("early", Role.NODE, now=now + 3 * DAY),
            "the plane refused our certificate: it is not valid yet by its clock",
            "its certificate is not valid yet by this machine's clock",
        ),
        (
            fleet.identity("stranger", Role.NODE, ca=other),
            "the plane does not know our certificate's CA",
            "its certificate is not signed by this fleet's CA",
        ),
    ]
    for identity, near_words, far_words in cases:
        *_, near_said, far_said = await shake(tls.client_context(fleet.ca_file, identity), server)
        assert near_words in near_said, identity
        assert far_words in far_said, identity


async def test_a_refused_client_reads_why_although_it_has_said_much_already(fleet: Fleet) -> None:
    """Over TCP, what it sent and nobody read would reset the connection and take the alert with it."""
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    identity = fleet.identity("expired", Role.NODE, now=time.time() - 3 * DAY)

    async def refuse(socket: trio.SocketStream) -> None:
        async with TlsStream(socket, server, server_side=True) as stream:
            with pytest.raises(trio.BrokenResourceError):
                await stream.do_handshake()
            await stream.linger(within=60)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        for _ in range(5):
            socket = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
            async with socket:
                client = tls.client_context(fleet.ca_file, identity)
                stream = trio.SSLStream(socket, client, server_hostname="127.0.0.1")
                await stream.do_handshake()
                await stream.send_all(b"x" * 20_000)
                with pytest.raises(trio.BrokenResourceError) as caught:
                    await stream.receive_some()
            assert "our certificate has expired" in tls.explain(caught.value)
        nursery.cancel_scope.cancel()


async def test_each_plane_that_is_not_ours_has_its_words(fleet: Fleet) -> None:
    now = time.time()
    other = pki.make_ca("llmgw test", now)
    clock = "by this machine's clock"
    cases = [
        (fleet.identity("late", Role.PLANE, now=now - 3 * DAY), "plane.example", f"has expired {clock}"),
        (fleet.identity("early", Role.PLANE, now=now + 3 * DAY), "plane.example", f"not valid yet {clock}"),
        (fleet.identity("stranger", Role.PLANE, ca=other), "plane.example", "not signed by this fleet's CA"),
        (fleet.identity("a-node", Role.NODE), "plane.example", "not one of a plane"),
        (fleet.identity("plane", Role.PLANE), "10.0.0.9", "add this one to `hosts` in plane.toml"),
        (fleet.identity("plane", Role.PLANE), "other.example", "add this one to `hosts` in plane.toml"),
    ]  # fmt: skip
    for identity, host, words in cases:
        client = tls.client_context(fleet.ca_file)
        _, _, said, _ = await shake(client, tls.server_context(fleet.ca_file, identity), host)
        assert said.startswith("the plane is not who it should be: "), identity
        assert words in said, identity


async def test_a_plane_by_its_address_is_good_when_the_certificate_has_it(fleet: Fleet) -> None:
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    *_, said, _ = await shake(tls.client_context(fleet.ca_file), server, "127.0.0.1")
    assert said == ""


async def test_an_older_tls_is_refused_in_words(fleet: Fleet) -> None:
    server = tls.server_context(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    old = tls.unverified_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    *_, near, far = await shake(old, server)
    assert "does not speak TLS 1.3" in near
    assert "does not speak TLS 1.3" in far


async def test_a_certificate_renewed_on_disk_is_presented_from_the_next_handshake_on(fleet: Fleet) -> None:
    """TL02, for the plane's own listeners."""
    server = tls.ServerTls(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    client = tls.client_context(fleet.ca_file)
    near, *_ = await shake(client, server.context())
    fresh = fleet.identity("fresh", Role.PLANE)
    fresh.replace(server.identity)
    context = server.context()
    again, *_ = await shake(client, context)
    assert [peer.name for peer in (near, again) if peer] == ["plane", "fresh"]
    assert server.context() is context


async def test_a_half_written_certificate_does_not_end_a_listener(fleet: Fleet) -> None:
    server = tls.ServerTls(fleet.ca_file, fleet.identity("plane", Role.PLANE))
    server.context()
    server.identity.write_text("-----BEGIN")
    with structlog.testing.capture_logs() as logs:
        near, *_ = await shake(tls.client_context(fleet.ca_file), server.context())
    assert near is not None
    assert [entry["event"] for entry in logs] == ["new certificate not usable, the old one stays"]


def test_files_that_cannot_be_used_are_named(fleet: Fleet) -> None:
    identity = fleet.identity("gpu-01", Role.NODE)
    with pytest.raises(NotFound, match=r"none.pem is missing \(the fleet's CA\)"):
        tls.client_context(fleet.directory / "none.pem")
    with pytest.raises(NotFound, match=r"none.pem \(key and certificate\) is missing"):
        tls.client_context(fleet.ca_file, fleet.directory / "none.pem")
    with pytest.raises(BadInput, match="it cannot be read as PEM"):
        tls.client_context(fleet.ca_file, fleet.ca_file)
    for content in ("", "nonsense", "\xff"):
        bad = fleet.directory / "bad.pem"
        bad.write_text(content)
        with pytest.raises(BadInput, match="holds no CA certificate"):
            tls.client_context(bad)
        with pytest.raises(BadInput, match="it cannot be read as PEM"):
            tls.client_context(fleet.ca_file, bad)
    mixed = fleet.directory / "mixed.pem"
    other = fleet.identity("gpu-02", Role.NODE).read_text()
    mixed.write_text(pki.key_to_pem(pki.make_key()) + other[other.index("-----BEGIN CERT") :])
    with pytest.raises(BadInput, match="its key is not the certificate's"):
        tls.client_context(fleet.ca_file, mixed)
    with pytest.raises(LlmgwError, match="is a directory, where a file is due"):
        tls.client_context(fleet.directory, identity)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(fleet: Fleet) -> None:
    locked = fleet.directory / "locked.pem"
    plain = fleet.identity("gpu-01", Role.NODE).read_text()
    hidden = pki.make_key().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    locked.write_text(hidden.decode() + plain[plain.index("-----BEGIN CERT") :])
    with pytest.raises(BadInput, match="cannot be used"):
        tls.client_context(fleet.ca_file, locked)


def test_an_error_that_is_not_tls_is_told_as_what_it_is() -> None:
    assert tls.explain(trio.BrokenResourceError(), "the plane") == (
        "the plane closed the connection during the TLS handshake (BrokenResourceError)"
    )
