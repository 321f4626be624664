"""The first contact, over real TLS on loopback: what a machine gets, and to whom it says its secret."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import structlog
import structlog.testing
import trio
import trio_websocket as ws

from llmgw import pki, tls
from llmgw.errors import BadInput, Conflict, LlmgwError, Refused, Unavailable
from llmgw.node.epoch import EPOCH
from llmgw.node.identity import IDENTITY, PENDING, Identity
from llmgw.node.join import join
from llmgw.pki import DAY, Role
from llmgw.plane.certs import Authority
from llmgw.plane.joining import answer_join, refuse_join
from llmgw.plane.store.memory import MemoryStore
from llmgw.plane.tokens import Tokens
from llmgw.wire.codec import agent_codec, encode
from llmgw.wire.control import Goodbye, Joined, JoinHello
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed, Frames, WebSocketFrames

pytestmark = pytest.mark.real

NODE = NodeId("gpu-01")
Answer = Callable[[Frames, str], Awaitable[None]]


@attrs.define
class Plane:
    """What answers on /join, with a CA of its own."""

    directory: Path
    authority: Authority
    tokens: Tokens
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    shown: Path | None = None  # another identity than its own, for impostors
    answer: Answer | None = None

    @classmethod
    def make(cls, directory: Path) -> Plane:
        directory.mkdir()
        ca = pki.make_ca("llmgw test", time.time())
        store = MemoryStore()
        (directory / "ca.pem").write_text(ca.pem)
        return cls(directory, Authority(ca, store), Tokens(store, ca.fingerprint))

    def identity(self, role: Role = Role.PLANE) -> Path:
        path = self.directory / f"{role}.pem"
        pem, _ = self.authority.sign_own("plane", role, self.hosts)
        path.write_text(pem)
        return path

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Its address while the block runs."""
        context = tls.server_context(self.directory / "ca.pem", self.shown or self.identity())
        answer = self.answer or partial(answer_join, authority=self.authority, tokens=self.tokens)

        async def serve(socket: trio.SocketStream) -> None:
            stream = trio.SSLStream(socket, context, server_side=True, https_compatible=True)
            try:
                async with trio.open_nursery() as nursery:
                    request = await ws.wrap_server_stream(nursery, stream)
                    connection = await request.accept()
                    await answer(WebSocketFrames(connection), "127.0.0.1")
                    await connection.aclose()
            except* (trio.BrokenResourceError, trio.ClosedResourceError, ws.HandshakeError, Closed):
                pass

        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
            yield f"wss://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            nursery.cancel_scope.cancel()


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane.make(tmp_path / "plane")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "node"


async def test_a_token_gets_an_identity_whose_key_never_left_the_machine(plane: Plane, directory: Path) -> None:
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        identity = await join(url, text, NODE, directory)
    assert identity.node == NODE
    assert identity.peer.role == "node"
    assert stat.S_IMODE((directory / IDENTITY).stat().st_mode) == 0o600
    assert not (directory / PENDING).exists()
    assert f'planes = ["{url}"]' in (directory / "node.toml").read_text()
    assert plane.authority.refused(identity.peer) == ""
    identity.context()  # key and certificate fit together


async def test_a_token_that_was_used_is_refused_to_the_next_machine(plane: Plane, tmp_path: Path) -> None:
    text, token = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, text, NODE, tmp_path / "a")
        with pytest.raises(Refused, match=rf"{url} refused: token {token.id} was used by gpu-01 .*: make a new one"):
            await join(url, text, NodeId("gpu-02"), tmp_path / "b")
    assert not (tmp_path / "b" / IDENTITY).exists()


async def test_an_impostor_with_another_ca_never_sees_the_secret(plane: Plane, tmp_path: Path) -> None:
    text, _ = await plane.tokens.create(60)
    impostor = Plane.make(tmp_path / "impostor")
    heard = await _heard_by(impostor, impostor.authority.ca_pem, text, tmp_path / "node", "its CA is another")
    assert heard == []


async def test_an_impostor_that_shows_the_right_ca_without_its_key_never_sees_the_secret(
    plane: Plane, tmp_path: Path
) -> None:
    """A CA's certificate is public: only a TLS certificate that it signed proves anything."""
    text, _ = await plane.tokens.create(60)
    impostor = Plane.make(tmp_path / "impostor")
    heard = await _heard_by(impostor, plane.authority.ca_pem, text, tmp_path / "node", "not signed by this fleet's CA")
    assert heard == []


async def test_a_node_that_passes_itself_off_as_the_plane_never_sees_the_secret(plane: Plane, tmp_path: Path) -> None:
    text, _ = await plane.tokens.create(60)
    plane.shown = plane.identity(Role.NODE)
    heard = await _heard_by(plane, plane.authority.ca_pem, text, tmp_path / "node", "is for a node, not for a plane")
    assert heard == []


async def _heard_by(impostor: Plane, shown_ca: str, token: str, directory: Path, words: str) -> list[bytes]:
    """What an impostor hears after its hello, when a machine tries to join it and must refuse in these words."""
    heard: list[bytes] = []

    async def answer(frames: Frames, address: str) -> None:
        await frames.send(encode(JoinHello(ca=shown_ca)))
        heard.append(await frames.receive())

    impostor.answer = answer
    async with impostor.listening() as url:
        with pytest.raises(Refused, match=f"{words}.*the token was not sent|the token was not sent") as caught:
            await join(url, token, NODE, directory)
    assert words in str(caught.value)
    assert not (directory / IDENTITY).exists()
    return heard


async def test_a_plane_that_is_reached_by_a_name_it_does_not_have_says_how_to_give_it_one(
    plane: Plane, directory: Path
) -> None:
    plane.hosts = ("plane.example",)
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(
            Refused, match=r"not for '127.0.0.1', only for plane.example; the token was not sent.*--host"
        ):
            await join(url, text, NODE, directory)


async def test_a_clock_that_is_far_behind_is_named(plane: Plane, directory: Path) -> None:

    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(Refused, match=r"not valid before .* this machine's clock says .* set the clock"):
            await join(url, text, NODE, directory, wall=lambda: time.time() - DAY)


async def test_a_clock_that_is_somewhat_off_is_remarked_on(plane: Plane, directory: Path) -> None:

    text, _ = await plane.tokens.create(60)
    with structlog.testing.capture_logs() as logs:
        async with plane.listening() as url:
            await join(url, text, NODE, directory, wall=lambda: time.time() - 630)
    assert any("clock is 10m" in entry["event"] for entry in logs)


async def test_neither_side_logs_the_token(plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, text, NODE, tmp_path / "a")
        with pytest.raises(Refused):
            await join(url, text, NodeId("gpu-02"), tmp_path / "b")
    secret = text.split(".")[2]
    said = capsys.readouterr()
    assert "node joined" in said.out + said.err
    assert secret not in said.out + said.err


async def test_a_machine_that_has_joined_is_not_joined_again_by_accident(plane: Plane, directory: Path) -> None:
    async with plane.listening() as url:
        await join(url, (await plane.tokens.create(60))[0], NODE, directory)
        before = (directory / IDENTITY).read_bytes()
        text, _ = await plane.tokens.create(60, node=NODE, replace=True)
        with pytest.raises(Conflict, match=r"joined already as gpu-01 .* --again"):
            await join(url, text, NODE, directory)
        assert (directory / IDENTITY).read_bytes() == before
        again = await join(url, text, NODE, directory, again=True)
    assert (directory / IDENTITY).read_bytes() != before
    assert plane.authority.refused(again.peer) == ""
    assert len([found for found in plane.authority.list() if found.revoked_at is not None]) == 1


async def test_a_name_that_is_taken_is_refused_and_the_token_stays_good(plane: Plane, tmp_path: Path) -> None:
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, (await plane.tokens.create(60))[0], NODE, tmp_path / "a")
        with pytest.raises(Refused, match=r"gpu-01 has joined already .* --replace"):
            await join(url, text, NODE, tmp_path / "b")
        assert (await join(url, text, NodeId("gpu-02"), tmp_path / "b")).node == "gpu-02"


async def test_an_answer_that_was_lost_is_given_again(plane: Plane, directory: Path) -> None:
    """The plane used the token up, and the machine never heard of it: the same token and key get an identity."""
    text, _ = await plane.tokens.create(60)
    real = partial(answer_join, authority=plane.authority, tokens=plane.tokens)

    class Losing:
        """Loses everything after the hello."""

        def __init__(self, inner: Frames) -> None:
            self.inner, self.sent = inner, 0
            self.receive, self.ping, self.aclose = inner.receive, inner.ping, inner.aclose

        async def send(self, data: bytes) -> None:
            self.sent += 1
            if self.sent > 1:
                raise Closed
            await self.inner.send(data)

    async def losing(frames: Frames, address: str) -> None:
        await real(Losing(frames), address)

    plane.answer = losing
    async with plane.listening() as url:
        with pytest.raises(Unavailable, match="closed the connection"):
            await join(url, text, NODE, directory)
    plane.answer = None
    async with plane.listening() as url:
        identity = await join(url, text, NODE, directory)
    assert plane.authority.refused(identity.peer) == ""


async def test_a_plane_without_certificates_says_that_no_join_is_needed(plane: Plane, directory: Path) -> None:
    plane.answer = refuse_join
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(Refused, match="insecure mode, without certificates: no join is needed"):
            await join(url, text, NODE, directory)


async def test_a_standby_names_the_leader(plane: Plane, directory: Path) -> None:
    async def answer(frames: Frames, address: str) -> None:
        await frames.send(encode(Goodbye(code="not-leader", reason="this plane stands by", leader="wss://b:7443")))

    plane.answer = answer
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(Unavailable, match="this plane stands by: join at wss://b:7443"):
            await join(url, text, NODE, directory)


@pytest.mark.parametrize("noise", [b"", b"\xc1", b"\x93" * 100, encode({"type": "newer"}), encode(Joined(node="x"))])
async def test_a_plane_that_talks_nonsense_is_an_error_in_words(plane: Plane, directory: Path, noise: bytes) -> None:
    async def answer(frames: Frames, address: str) -> None:
        await frames.send(noise)

    plane.answer = answer
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(Unavailable, match=f"{url} (speaks another protocol|answered with something else)"):
            await join(url, text, NODE, directory)


async def test_nobody_there_is_an_error_in_words(plane: Plane, directory: Path) -> None:
    text, _ = await plane.tokens.create(60)
    with pytest.raises(Unavailable, match=r"cannot reach wss://127.0.0.1:1: .*is the plane running there"):
        await join("wss://127.0.0.1:1", text, NODE, directory)
    with pytest.raises(Unavailable, match=r"cannot reach wss://no.such.host.invalid:7443"):
        await join("wss://no.such.host.invalid", text, NODE, directory)


async def test_a_port_that_speaks_no_tls_is_named(plane: Plane, directory: Path) -> None:
    async def babble(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    text, _ = await plane.tokens.create(60)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, babble, 0, host="127.0.0.1"))
        with pytest.raises(Unavailable, match="does not speak TLS here"):
            await join(f"wss://127.0.0.1:{listeners[0].socket.getsockname()[1]}", text, NODE, directory)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ws://127.0.0.1:7443", "is without TLS: a plane in insecure mode needs no join"),
        ("ws://10.0.0.1:7443", "is not encrypted"),
        ("ftp://a", "is no address of a plane"),
        ("wss://", "is no address of a plane"),
        ("wss://a:99999", "is no address of a plane"),
        ("", "is no address of a plane"),
    ],
)
async def test_an_address_that_cannot_be_meant_is_refused_before_anything_is_done(
    url: str, words: str, directory: Path
) -> None:
    with pytest.raises(BadInput, match=words):
        await join(url, f"llmgw1.a.b.{'f' * 43}", NODE, directory)
    assert not (await trio.Path(directory).exists())


@pytest.mark.parametrize("token", ["", "abc", "llmgw1.a.b", "llmgw1.a.b.short"])
async def test_a_token_that_was_not_copied_whole_is_refused_without_being_repeated(token: str, directory: Path) -> None:
    with pytest.raises(BadInput, match="not a whole join token") as caught:
        await join("wss://127.0.0.1", token, NODE, directory)
    assert not token or not re.search(rf"\b{re.escape(token)}\b", str(caught.value))


async def test_a_directory_that_cannot_be_made_is_named(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text, _ = await plane.tokens.create(60)
    with pytest.raises(LlmgwError, match=r"cannot make .*file/node: Not a directory"):
        await join("wss://127.0.0.1:1", text, NODE, tmp_path / "file" / "node")


async def test_settings_that_are_there_stay_as_they_are(plane: Plane, directory: Path) -> None:
    await trio.Path(directory).mkdir()
    (directory / "node.toml").write_text('address = "10.0.0.1"\n')
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, text, NODE, directory)
    assert (directory / "node.toml").read_text() == 'address = "10.0.0.1"\n'


async def test_settings_that_name_another_plane_are_remarked_on(plane: Plane, directory: Path) -> None:
    await trio.Path(directory).mkdir()
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        (directory / "node.toml").write_text('planes = ["wss://old.example"]\n')
        with structlog.testing.capture_logs() as logs:
            await join(url, text, NODE, directory)
    assert any(f"does not name {url}" in entry["event"] for entry in logs)


async def test_a_join_anew_forgets_what_the_former_plane_was_obeyed_in(plane: Plane, directory: Path) -> None:
    await trio.Path(directory).mkdir()
    (directory / EPOCH).write_text("41\n")
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, text, NODE, directory)
    assert not (directory / EPOCH).exists()


@pytest.mark.parametrize("how", ["@", "-"])
async def test_a_token_need_not_stand_where_ps_shows_it(plane: Plane, directory: Path, how: str) -> None:
    text, _ = await plane.tokens.create(60)
    file = plane.directory / "token"
    file.write_text(f"{text}\n")
    program = [sys.executable, "-c", "from llmgw.cli import node; node()"]
    async with plane.listening() as url:
        argv = [*program, "join", url, "--token", f"@{file}" if how == "@" else "-", "--name", NODE]
        done = await trio.run_process(
            [*argv, "--dir", str(directory)], stdin=f"{text}\n".encode(), capture_stdout=True, capture_stderr=True
        )
    assert f"Joined as {NODE}" in done.stdout.decode()


def test_every_file_of_an_identity_is_its_owners(directory: Path, plane: Plane) -> None:
    async def joined() -> None:
        text, _ = await plane.tokens.create(60)
        async with plane.listening() as url:
            await join(url, text, NODE, directory)

    umask = os.umask(0)
    try:
        trio.run(joined)
    finally:
        os.umask(umask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
    assert modes == {"node": 0o700, IDENTITY: 0o600, "ca.pem": 0o644, "node.toml": 0o644}


async def test_the_join_says_which_version_comes(plane: Plane, directory: Path) -> None:
    heard: list[object] = []

    async def answer(frames: Frames, address: str) -> None:
        await frames.send(encode(JoinHello(ca=plane.authority.ca_pem)))
        heard.append(agent_codec.decode(await frames.receive()))
        await frames.send(encode(Joined(error="enough")))

    plane.answer = answer
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        with pytest.raises(Refused, match="enough"):
            await join(url, text, NODE, directory)
    (said,) = heard
    assert getattr(said, "version", "")


async def test_an_identity_that_others_can_read_is_refused(plane: Plane, directory: Path) -> None:
    text, _ = await plane.tokens.create(60)
    async with plane.listening() as url:
        await join(url, text, NODE, directory)
    (directory / IDENTITY).chmod(0o644)
    with pytest.raises(LlmgwError, match=r"can be read by others .*: chmod 600"):
        Identity.load(directory)
