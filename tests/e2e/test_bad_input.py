"""Bad input everywhere gets a clear error, and nothing else breaks: over the real processes and their command lines."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import trio

from llmgw.demo.processes import command, environment
from llmgw.node.identity import Identity
from llmgw.node.link import Address, dial
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.codec import Unknown, control_codec, encode
from llmgw.wire.control import Goodbye
from llmgw.wire.facts import NodeId
from llmgw.wire.stream import Closed
from tests.e2e.rig import Rig, patient, rig

pytestmark = pytest.mark.real


def ran(program: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """One of our programs, run to its end."""
    return subprocess.run(
        command(program, *args),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment("none"),
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It failed with these words, in a line or a few, and without a traceback."""
    assert done.returncode not in (0, -6, -11), done.stdout
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, nodes=1, replicas=1) as made:
        yield made


async def applied(fleet: Rig, text: str) -> subprocess.CompletedProcess[str]:
    file = fleet.root / "wanted.toml"
    file.write_text(text)
    args = ["ctl", "--dir", str(fleet.directory), "apply", "-f", str(file)]
    return await trio.to_thread.run_sync(lambda: ran("llmgw", *args))


@pytest.mark.slow
async def test_whatever_is_sent_to_a_running_fleet_is_refused_in_words_and_it_serves_on(fleet: Rig) -> None:
    # models.toml
    refused(await applied(fleet, '[[models]\nname = "x"'), "line 1", "column")
    refused(
        await applied(fleet, '[[models]]\nname = "x"\nreplica = 2\nprofile = {engine = "llamacpp", source = "/x"}'),
        "line 3",
        "replica",
        "did you mean",
        "replicas",
    )
    # requests to the gateway
    async with patient() as client:
        unknown = await fleet.chat(client, model="tinny")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        broken = await client.post(f"{fleet.gateway}/v1/chat/completions", content=b"{not json")
        assert broken.status_code == 400
        assert broken.json()["error"]["type"] == "invalid_request_error"
        huge = await client.post(f"{fleet.gateway}/v1/chat/completions", content=b"x" * (100 << 20))
        assert huge.status_code == 413
        assert "limit" in huge.json()["error"]["message"]
        # frames to the agents' port, by a node that has joined
        await fleet.join("n2")
        identity = Identity.load(fleet.root / "n2")
        where = Address("127.0.0.1", fleet.agents, True)
        for frames, words in [
            ([b"\xff\xff\xff"], "not a Register"),
            ([encode(Heartbeat())], "must be a Register"),
            ([b"x" * 70_000], "65536 are allowed"),
            ([encode(Register(node=NodeId("n1"), version="0.1.0"))], "the certificate says 'n2'"),
            ([encode(Register(node=NodeId("n2"), version="0.1.0")), b"\x00garbage"], "cannot be read"),
            (
                [encode(Register(node=NodeId("n2"), version="0.1.0")), encode({"type": "heartbeat", "load": "none"})],
                "cannot be read",
            ),
        ]:
            assert words in await last_words(where, identity, frames)
        # strangers
        assert "no certificate" in await last_words(where, None, [], identity)
        with socket.create_connection(("127.0.0.1", fleet.agents)) as stranger:
            stranger.sendall(os.urandom(4096))
        # and all the while it serves
        assert (await fleet.chat(client)).status_code == 200
    assert await fleet.ready(1)
    assert (await fleet.node("n1"))["connected"]


async def last_words(
    where: Address, identity: Identity | None, frames: Sequence[bytes], trusted: Identity | None = None
) -> str:
    """What the plane says last to an agent that says these frames."""
    known = identity or trusted
    assert known is not None
    context = known.context()
    if identity is None:
        from llmgw import tls

        context = tls.client_context(known.directory / "ca.pem")
    with trio.fail_after(60):
        async with dial(where, context) as stream:
            for frame in frames:
                await stream.send(frame)
            try:
                while True:
                    message = control_codec.decode(await stream.receive())
                    if isinstance(message, Goodbye):
                        return message.reason
                    assert not isinstance(message, Unknown)
            except Closed as closed:
                return closed.reason
    raise AssertionError


def test_a_malformed_plane_toml_is_an_error_with_line_and_column(tmp_path: Path) -> None:
    made = ran("llmgw-plane", "init", "--dir", str(tmp_path / "p"))
    assert made.returncode == 0, made.stderr
    settings = tmp_path / "p" / "plane.toml"
    good = settings.read_text()
    settings.write_text(good + "\nheartbeat = = 5\n")
    refused(ran("llmgw-plane", "run", "--dir", str(tmp_path / "p")), "plane.toml", "line", "column")
    settings.write_text(good + '\nhartbeat = "5s"\n')
    refused(ran("llmgw-plane", "run", "--dir", str(tmp_path / "p")), "hartbeat", "did you mean", "heartbeat")


def test_a_port_in_use_names_the_port_and_the_setting(tmp_path: Path) -> None:
    assert ran("llmgw-plane", "init", "--dir", str(tmp_path / "p")).returncode == 0
    settings = tmp_path / "p" / "plane.toml"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        lines = [line for line in settings.read_text().splitlines() if not line.startswith("agents_listen")]
        settings.write_text(f'agents_listen = "127.0.0.1:{port}"\n' + "\n".join(lines))
        refused(ran("llmgw-plane", "run", "--dir", str(tmp_path / "p")), str(port), "agents_listen")


def test_a_state_database_of_a_newer_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    assert ran("llmgw-plane", "init", "--dir", str(tmp_path / "p")).returncode == 0
    database = tmp_path / "p" / "plane.db"
    from llmgw.plane.store.sqlite import APPLICATION

    with sqlite3.connect(database) as db:
        db.execute(f"pragma application_id = {APPLICATION}")
        db.execute("pragma user_version = 999")
        db.execute("create table entries (x)")
    db.close()
    before = database.read_bytes()
    refused(ran("llmgw-plane", "run", "--dir", str(tmp_path / "p")), "plane.db", "newer")
    assert database.read_bytes() == before


def test_an_unwritable_state_directory_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(ran("llmgw-plane", "init", "--dir", str(blocked / "p")), str(blocked))
    refused(ran("llmgw-node", "run", "--dir", str(tmp_path / "nowhere")), "join")


def test_a_token_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    directory = tmp_path / "n"
    done = ran("llmgw-node", "join", "wss://127.0.0.1:1", "--token", "nonsense", "--name", "x", "--dir", str(directory))
    refused(done, "token")
    assert not (directory / "identity.pem").exists()
