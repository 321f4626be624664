"""Starting, stopping, TLS on both sides."""

from __future__ import annotations

import datetime
import socket
import ssl
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmgw.cell import Cell
from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState, Routes
from llmgw.plane.gateway.serve import serve
from llmgw.plane.gateway.settings import GatewaySettings
from tests.plane.gateway.parts import STREAM, Browser, Call, House, Houses, chat, chunk, get, until
from tests.ports import free_ports

pytestmark = pytest.mark.real


async def test_a_stop_lets_streams_finish_and_closes_what_is_idle(house: House) -> None:
    go_on = trio.Event()

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        await go_on.wait()
        await call.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    house.serves(await house.engine(script))
    idle = await house.browser()
    assert (await idle.ask(get(b"/health"), b"GET")).status == 200
    busy = await house.browser()
    await busy.send(chat(stream=True))
    head = await busy.head()
    house.stop.set()
    await idle.closed()
    assert not house.stopped.is_set()
    with pytest.raises(OSError):
        await trio.open_tcp_stream("127.0.0.1", house.port)
    go_on.set()
    answer = await busy.rest(head)
    assert (answer.whole, answer.body) == (True, b"data: 1\n\ndata: [DONE]\n\n")
    with trio.fail_after(20):
        await house.stopped.wait()


async def test_a_stop_cuts_what_does_not_finish_in_time(houses: Houses) -> None:
    house = await houses(stop_within=0.05)

    async def script(call: Call) -> None:
        await call.send(STREAM + chunk(b"data: 1\n\n"))
        await call.hung_up()

    house.serves(await house.engine(script))
    busy = await house.browser()
    await busy.send(chat(stream=True))
    head = await busy.head()
    house.stop.set()
    with trio.fail_after(20):
        await house.stopped.wait()
    assert not (await busy.rest(head)).whole


async def test_requests_that_wait_for_a_model_are_told_at_a_stop(house: House) -> None:
    house.route("tiny", ModelRoute(state=ModelState.STARTING))
    browser = await house.browser()
    await browser.send(chat())
    await until(lambda: house.gateway.metrics.held == {"tiny": 1})
    house.stop.set()
    with trio.fail_after(20):
        assert (await browser.answer()).status == 503
        await house.stopped.wait()


def _certificate(path: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context and one that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + pem)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=pem.decode())


async def test_tls_to_clients_and_to_engines_carries_a_stream(nursery: trio.Nursery, tmp_path: Path) -> None:
    server, trust = _certificate(tmp_path / "pem", "localhost")
    events = [b"data: %d\n\n" % n * 3000 for n in range(20)]

    async def engine(stream: trio.SSLStream[trio.SocketStream]) -> None:
        got = b""
        while b'"stream": true' not in got:
            got += await stream.receive_some()
        await stream.send_all(STREAM)
        for event in events:
            await stream.send_all(chunk(event))
        await stream.send_all(b"0\r\n\r\n")

    (port,) = free_ports(1)
    await nursery.start(partial(trio.serve_ssl_over_tcp, engine, port, server, host="127.0.0.1"))
    endpoint = Endpoint(replica="r", host="localhost", port=port, tls=True)
    routes = Cell(Routes(models={"tiny": ModelRoute(state=ModelState.READY, endpoints=(endpoint,))}))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def gateway(*, task_status: trio.TaskStatus[object]) -> None:
        await serve(listeners, routes, GatewaySettings(), tls=server, trust=trust, task_status=task_status)

    await nursery.start(gateway)
    raw = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
    async with trio.SSLStream(raw, trust, server_hostname="localhost", https_compatible=True) as stream:
        answer = await Browser(stream).ask(chat(stream=True))
    assert (answer.status, answer.body, answer.whole) == (200, b"".join(events), True)


async def test_an_engine_whose_certificate_is_not_trusted_is_502_with_the_reason(
    houses: Houses, nursery: trio.Nursery, tmp_path: Path
) -> None:
    server, _ = _certificate(tmp_path / "pem", "localhost")

    async def engine(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.do_handshake()

    (port,) = free_ports(1)
    await nursery.start(partial(trio.serve_ssl_over_tcp, engine, port, server, host="127.0.0.1"))
    house = await houses(tries=1)
    endpoint = Endpoint(replica="r", host="localhost", port=port, tls=True)
    house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(endpoint,)))
    answer = await house.ask(chat())
    assert answer.status == 502
    assert "certificate is not trusted" in str(answer.error["message"])


class Nowhere(trio.abc.HostnameResolver):
    """Knows no name, and says so at once, whatever network this machine is on."""

    async def getaddrinfo(self, host: object, *_rest: object, **_more: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, *_address: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_a_name_that_does_not_resolve_is_502_with_the_reason(houses: Houses) -> None:
    trio.socket.set_custom_hostname_resolver(Nowhere())
    house = await houses(tries=1)
    endpoint = Endpoint(replica="r", host="no-such-host.invalid", port=1)
    house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(endpoint,)))
    answer = await house.ask(chat())
    assert answer.status == 502
    assert "no-such-host.invalid" in str(answer.error["message"])


async def test_a_name_that_no_host_can_have_is_502_with_the_reason(houses: Houses) -> None:
    house = await houses(tries=1)
    house.route("tiny", ModelRoute(state=ModelState.READY, endpoints=(Endpoint(replica="r", host="a..b", port=1),)))
    answer = await house.ask(chat())
    assert answer.status == 502
    assert "a..b has no address: no host can have this name" in str(answer.error["message"])
