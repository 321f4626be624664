"""The admin API over real TLS: who comes in, what is answered, and what ends when a client goes away."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import trio
import trio.testing

from llmgw import pki
from llmgw.errors import AgentGone
from llmgw.pki import Role
from llmgw.plane.admin.serve import IDLE
from llmgw.plane.fleet import Fleet
from llmgw.plane.own import ADMIN_TOKEN, CA
from llmgw.plane.stream import AgentStream
from llmgw.wire.agent import Register
from llmgw.wire.api import LogsReplyView, StatusReply
from llmgw.wire.apicommon import ErrorReply
from llmgw.wire.control import Pace
from llmgw.wire.facts import ModelName, NodeId
from llmgw.wire.nodeapi import NodesReply
from tests.fakes.frames import pair
from tests.plane.admin.rig import Rig, served

pytestmark = pytest.mark.real


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with served(tmp_path) as made:
        yield made


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, msgspec.json.decode(response.content, type=ErrorReply).error.code


async def test_a_bearer_token_opens(rig: Rig) -> None:
    async with rig.client() as http:
        response = await http.get("/api/v1/status")
    assert response.status_code == 200
    assert msgspec.json.decode(response.content, type=StatusReply).plane == "plane-1"


async def test_an_administrators_certificate_opens_without_a_token(rig: Rig) -> None:
    async with rig.client(token=False, identity=rig.admin_identity) as http:
        response = await http.get("/api/v1/nodes")
    assert [node.id for node in msgspec.json.decode(response.content, type=NodesReply).nodes] == [
        "gpu-01",
        "node-a",
        "node-b",
    ]


async def test_nobody_without_either_comes_in(rig: Rig) -> None:
    async with rig.client(token=False) as http:
        response = await http.get("/api/v1/status")
    assert error(response) == (401, "not-authenticated")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("header", [b"Bearer wrong", b"Bearer", b"Basic YTpi", b"", b"Bearer \xff\xfe"])
async def test_a_wrong_token_stays_outside(rig: Rig, header: bytes) -> None:
    async with rig.client(token=False) as http:
        response = await http.get("/api/v1/status", headers={b"Authorization": header})
    assert error(response) == (401, "not-authenticated")


async def test_a_wrong_token_is_not_rescued_by_a_certificate(rig: Rig) -> None:
    async with rig.client(token=False, identity=rig.admin_identity) as http:
        response = await http.get("/api/v1/status", headers={"Authorization": "Bearer wrong"})
    assert response.status_code == 401


def identity(rig: Rig, name: str, role: Role) -> Path:
    pem, _ = rig.admin.authority.sign_own(name, role)
    path = rig.directory / f"{name}.pem"
    path.write_text(pem)
    return path


async def test_a_nodes_certificate_is_no_administrators(rig: Rig) -> None:
    async with rig.client(token=False, identity=identity(rig, "node-a", Role.NODE)) as http:
        response = await http.get("/api/v1/status")
    assert error(response) == (403, "refused")
    assert "node-a" in response.text


async def test_a_revoked_administrator_stays_outside(rig: Rig) -> None:
    pem, peer = rig.admin.authority.sign_own("carol", Role.ADMIN)
    await rig.admin.authority.record(peer)
    path = rig.directory / "carol.pem"
    path.write_text(pem)
    async with rig.client(token=False, identity=path) as http:
        assert (await http.get("/api/v1/status")).status_code == 200
        await rig.admin.authority.revoke("carol", "left")
        response = await http.get("/api/v1/status")
    assert error(response) == (403, "refused")


async def test_a_certificate_of_another_ca_does_not_even_get_through_tls(rig: Rig, tmp_path: Path) -> None:
    now = time.time()
    other, key = pki.make_ca("other", now), pki.make_key()
    leaf = other.issue(key.public_key(), "admin", Role.ADMIN, now=now, life=3600)
    path = tmp_path / "other.pem"
    path.write_text(pki.key_to_pem(key) + pki.to_pem(leaf))
    async with rig.client(token=False, identity=path) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/api/v1/status")
    async with rig.client() as http:
        assert (await http.get("/api/v1/status")).status_code == 200


async def test_a_token_that_was_taken_out_of_the_file_opens_nothing_any_more(rig: Rig) -> None:
    async with rig.client() as http:
        assert (await http.get("/api/v1/status")).status_code == 200
        (rig.directory / ADMIN_TOKEN).write_text("lga-another-token-of-some-length\n")
        assert (await http.get("/api/v1/status")).status_code == 401


async def test_without_the_file_of_tokens_none_counts_and_nobody_hears_where_it_was(rig: Rig) -> None:
    (rig.directory / ADMIN_TOKEN).rename(rig.directory / "away")
    headers = {"Authorization": f"Bearer {(rig.directory / 'away').read_text().strip()}"}
    async with rig.client(token=False) as http:
        response = await http.get("/api/v1/status", headers=headers)
    assert error(response) == (401, "not-authenticated")
    assert str(rig.directory) not in response.text


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/v1/nothing", (404, "not-found")),
        ("GET", "/nothing", (404, "not-found")),
        ("GET", "/api/v2/status", (404, "not-found")),
        ("POST", "/api/v1/status", (405, "method-not-allowed")),
        ("GET", "/api/v1/nodes/nobody", (404, "not-found")),
        ("GET", "/api/v1/why/nothing", (404, "not-found")),
        ("POST", "/api/v1/nodes/nobody/cordon", (404, "not-found")),
        ("GET", "/api/v1/logs/nobody", (404, "not-found")),
        ("GET", "/api/v1/logs/gpu-01", (503, "agent-gone")),
        ("GET", "/api/v1/logs/node-a/broken", (502, "failed")),
        ("GET", "/api/v1/logs/node-a?lines=many", (400, "bad-input")),
        ("GET", "/api/v1/logs/node-a?lines=-1", (400, "bad-input")),
        ("GET", "/api/v1/events?wait=inf", (400, "bad-input")),
        ("GET", "/api/v1/events?after=nan", (400, "bad-input")),
        ("DELETE", "/api/v1/tokens/none", (404, "not-found")),
        ("POST", "/api/v1/nodes/node-a/forget", (409, "conflict")),
        ("POST", "/api/v1/nodes/node-a/label", (400, "bad-input")),
    ],
)
async def test_every_error_is_json_with_a_code_and_words(
    rig: Rig, method: str, path: str, expected: tuple[int, str]
) -> None:
    async with rig.client() as http:
        response = await http.request(method, path)
    assert error(response) == expected
    assert response.headers["Content-Type"] == "application/json"
    assert msgspec.json.decode(response.content, type=ErrorReply).error.message
    assert "Traceback" not in response.text


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"labels": 1}', b'{"lables": {}}', b"\xff\xff", b"[" * 100_000])
async def test_a_body_that_cannot_be_meant_is_answered_in_words(rig: Rig, body: bytes) -> None:
    async with rig.client() as http:
        response = await http.post("/api/v1/nodes/node-a/label", content=body)
    assert error(response) == (400, "bad-input")


async def test_an_unforeseen_failure_shows_no_traceback(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(node: str, on: bool) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(rig.fleet, "cordon", fails)
    async with rig.client() as http:
        response = await http.post("/api/v1/nodes/node-a/cordon")
    assert error(response) == (500, "internal")
    assert "secret" not in response.text


#: Bytes: more than the kernel takes on both sides while nobody reads.
MUCH = 24 << 20


async def test_more_than_all_buffers_hold_is_refused_and_the_reason_is_read(rig: Rig) -> None:
    async with rig.client() as http:
        response = await http.post("/api/v1/apply", content=b"#" * MUCH)
        assert error(response) == (413, "request-entity-too-large")
        assert (await http.get("/api/v1/status")).status_code == 200


async def test_an_unauthenticated_upload_is_refused_too(rig: Rig) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MUCH >> 20):
            yield b"#" * (1 << 20)

    async with rig.client(token=False) as http:
        response = await http.post("/api/v1/apply", content=endless())
    assert error(response) == (401, "not-authenticated")


@pytest.mark.parametrize(
    ("verbs", "cordoned", "draining"),
    [
        (["cordon"], True, False),
        (["cordon", "uncordon"], False, False),
        (["drain"], False, True),
        (["drain", "undrain"], False, False),
    ],
)
async def test_an_operator_steers_a_node(rig: Rig, verbs: list[str], cordoned: bool, draining: bool) -> None:
    async with rig.client() as http:
        for verb in verbs:
            assert (await http.post(f"/api/v1/nodes/node-a/{verb}")).status_code == 200
    node = rig.fleet.world.value.nodes[NodeId("node-a")]
    assert (node.cordoned, node.draining) == (cordoned, draining)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"within": null}', b'{"within": 600}'])
async def test_a_drain_may_be_asked_for_with_or_without_a_deadline(rig: Rig, body: bytes) -> None:
    async with rig.client() as http:
        assert (await http.post("/api/v1/nodes/node-a/drain", content=body)).status_code == 200
        row = (await http.get("/api/v1/nodes/node-a")).json()["node"]
    assert (row["draining"], row["drained"], row["drain_within"]) == (True, False, 600.0 if b"600" in body else None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("nodes/node-a/drain", b'{"within": -1}'),
        ("nodes/node-a/drain", b'{"within": 1e300}'),
        ("nodes/node-a/drain", b'{"wihtin": 1}'),
        ("models/tiny/scale", b""),
        ("models/tiny/scale", b'{"replicas": -1}'),
        ("models/tiny/scale", b'{"replicas": 1.5}'),
        ("models/tiny/scale", b'{"replicas": "2"}'),
        ("models/tiny/rollback", b'{"revision": "one"}'),
    ],
)
async def test_what_cannot_be_meant_changes_nothing(rig: Rig, path: str, body: bytes) -> None:
    before = rig.fleet.world.value.version
    async with rig.client() as http:
        assert error(await http.post(f"/api/v1/{path}", content=body)) == (400, "bad-input")
    assert rig.fleet.world.value.version == before


async def test_names_of_models_with_a_slash_reach_their_model(rig: Rig) -> None:
    text = '[[models]]\nname = "org/scale"\nengine = "llamacpp"\nsource = "/m"\n'
    async with rig.client() as http:
        await http.post("/api/v1/apply", content=text)
        for path in ("models/org/scale/scale", "models/org%2Fscale/scale"):
            assert (await http.post(f"/api/v1/{path}", json={"replicas": 4})).status_code == 200
        history = (await http.get("/api/v1/models/org%2Fscale/history")).json()
    assert (history["model"], history["revision"]) == ("org/scale", 1)


async def test_a_scale_outlives_a_restart_of_the_plane(rig: Rig) -> None:
    async with rig.client() as http:
        await http.post("/api/v1/models/tiny/scale", json={"replicas": 7})
    later = Fleet(rig.store)
    await later.load()
    assert later.world.value.models[ModelName("tiny")].replicas == 7


async def test_labels_are_set_and_taken_away(rig: Rig) -> None:
    async with rig.client() as http:
        await http.post("/api/v1/nodes/gpu-01/label", json={"labels": {"zone": "b", "rack": None}})
        rows = (await http.get("/api/v1/nodes")).json()["nodes"]
    assert [row["labels"] for row in rows if row["id"] == "gpu-01"] == [{"zone": "b"}]


async def test_a_problem_is_acknowledged_for_a_time_and_no_longer_counted(rig: Rig) -> None:
    async with rig.client() as http:
        before = (await http.get("/api/v1/status")).json()["problems"]
        found = (await http.get("/api/v1/problems")).json()["problems"][0]
        known = {"subject": found["subject"], "code": found["code"], "seconds": 3600}
        assert (await http.post("/api/v1/nodes/gpu-01/acknowledge", json=known)).status_code == 200
        after = (await http.get("/api/v1/status")).json()["problems"]
        found = (await http.get("/api/v1/problems")).json()["problems"][0]
    assert (before, after) == ({"bad": 1}, {})
    assert 3000 < found["acknowledged_for"] <= 3600


async def test_what_a_node_has_now_is_confirmed_and_that_is_taken_back(rig: Rig) -> None:
    async with rig.client() as http:
        done = await http.post("/api/v1/nodes/gpu-01/expect", json={})
        assert done.json()["text"].startswith("gpu-01 is expected to have 1 NVIDIA H200 GPU, 1 fabric ib port, ")
        node = (await http.get("/api/v1/nodes/gpu-01")).json()
        assert node["expected"]["gpus"] == {"NVIDIA H200": 1}
        assert [event["kind"] for event in node["history"]] == ["node-expected"]
        assert (await http.post("/api/v1/nodes/gpu-01/expect", json={"clear": True})).status_code == 200
        assert (await http.get("/api/v1/nodes/gpu-01")).json()["expected"] is None
        # What is not there cannot be looked at.
        refused = await http.post("/api/v1/nodes/node-b/expect", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert (await http.post("/api/v1/nodes/nobody/expect", json={})).status_code == 404
        assert (await http.post("/api/v1/nodes/gpu-01/expect", json={"clera": True})).status_code == 400


async def test_forgetting_a_node_shuts_its_certificate_out_too(rig: Rig) -> None:
    await rig.admin.authority.issue("node-b", pki.make_request(pki.make_key()))
    async with rig.client() as http:
        assert (await http.post("/api/v1/nodes/node-b/forget")).status_code == 200
        certs = (await http.get("/api/v1/certs")).json()["certs"]
        assert error(await http.get("/api/v1/nodes/node-b")) == (404, "not-found")
    assert [(cert["name"], cert["state"]) for cert in certs] == [("node-b", "revoked")]


async def test_a_node_that_connects_while_it_is_being_forgotten_loses_that_stream(rig: Rig) -> None:
    """Or it would go on over a stream that speaks for nobody, and never register again."""
    ours, _theirs = pair()
    stream = AgentStream(ours, Register(node=NodeId("node-b"), version="1"), number=99, address="192.0.2.9")
    with rig.hub.attached(stream):
        async with rig.client() as http:
            assert (await http.post("/api/v1/nodes/node-b/forget")).status_code == 200
        with pytest.raises(AgentGone):
            rig.hub.tell(NodeId("node-b"), Pace(heartbeat=5.0))


MODELS = """
[[models]]
name = "other"
replicas = 2
[models.profile]
engine = "llamacpp"
source = "/m/other.gguf"
"""


async def test_apply_says_what_it_changes_and_a_dry_run_changes_nothing(rig: Rig) -> None:
    async with rig.client() as http:
        dry = (await http.post("/api/v1/apply?dry_run=1", content=MODELS)).json()
        assert "other" not in rig.fleet.world.value.models
        done = (await http.post("/api/v1/apply", content=MODELS)).json()
    changes = {"api": 1, "added": ["other"], "changed": [], "removed": ["big", "tiny"], "unchanged": []}
    changes["words"] = {}
    assert dry == {"dry_run": True, **changes}
    assert done == {"dry_run": False, **changes}
    assert list(rig.fleet.world.value.models) == ["other"]


@pytest.mark.parametrize("body", [b"[[models]\n", b"[[models]]\nnmae = 'x'\n", b"\xff\xfe", b"models = 1"])
async def test_a_models_file_that_cannot_be_meant_changes_nothing(rig: Rig, body: bytes) -> None:
    async with rig.client() as http:
        assert error(await http.post("/api/v1/apply", content=body)) == (400, "bad-input")
    assert sorted(rig.fleet.world.value.models) == ["big", "tiny"]


async def test_logs_come_from_the_node(rig: Rig) -> None:
    async with rig.client() as http:
        response = await http.get("/api/v1/logs/node-a/tiny-0-0?lines=2")
    reply = msgspec.json.decode(response.content, type=LogsReplyView)
    assert (reply.source, reply.lines, reply.cursor) == ("tiny-0-0", ("first line", "second \x1b[31mline"), "c1")
    assert [source.name for source in reply.sources] == ["agent", "tiny-0-0"]


async def test_the_asker_going_away_withdraws_the_request_on_the_node(rig: Rig) -> None:
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            async with rig.client() as http:
                await http.get("/api/v1/logs/node-a/slow?wait=60")

        nursery.start_soon(ask)
        await rig.agent.hanging.wait()
        nursery.cancel_scope.cancel()
    with trio.fail_after(30):
        await rig.agent.withdrawn.wait()


async def test_a_long_poll_of_events_ends_with_the_next_event(rig: Rig) -> None:
    async with rig.client() as http, trio.open_nursery() as nursery:
        latest = (await http.get("/api/v1/events")).json()["latest"]
        answered: list[list[str]] = []

        async def poll() -> None:
            response = await http.get(f"/api/v1/events?after={latest}&wait=30")
            answered.append([event["text"] for event in response.json()["events"]])

        nursery.start_soon(poll)
        await trio.testing.wait_all_tasks_blocked(0.1)
        rig.fleet.events.add("node-lost", "node:node-b", "node-b is lost", clock=1.0)
    assert answered == [["node-b is lost"]]


async def test_events_of_one_node_are_all_that_its_readers_hear(rig: Rig) -> None:
    def happens(kind: str, node: str) -> None:
        rig.fleet.events.add(kind, f"shard:x-{node}", f"{kind} at {node}", clock=1.0, data={"node": node})

    async with rig.client() as http, trio.open_nursery() as nursery:
        happens("shard-failed", "gpu-01")
        latest = (await http.get("/api/v1/events?node=gpu-01")).json()["latest"]
        assert latest == rig.fleet.events.latest.value
        listed = (await http.get("/api/v1/events?node=gpu-01")).json()["events"]
        assert [event["text"] for event in listed] == ["shard-failed at gpu-01"]
        heard: list[list[str]] = []

        async def poll() -> None:
            response = await http.get(f"/api/v1/events?after={latest}&wait=30&node=gpu-01")
            heard.append([event["text"] for event in response.json()["events"]])

        nursery.start_soon(poll)
        await trio.testing.wait_all_tasks_blocked(0.1)
        happens("shard-failed", "node-a")
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert heard == []
        happens("shard-ready", "gpu-01")
    assert heard == [["shard-ready at gpu-01"]]


async def test_a_long_poll_without_an_event_is_answered_empty(rig: Rig) -> None:
    async with rig.client() as http:
        response = await http.get("/api/v1/events?after=1&wait=0.05")
    assert response.json() == {"api": 1, "events": [], "latest": 1}


async def read_to_the_end(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    found = b""
    with trio.fail_after(30):
        while data := await stream.receive_some(65536):
            found += data
    return found


@asynccontextmanager
async def raw(rig: Rig) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", rig.port, ssl_context=rig.tls(), https_compatible=True)
    await stream.do_handshake()
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


def request_of(rig: Rig, path: str) -> bytes:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {rig.token}\r\n\r\n"
    return head.encode()


async def test_a_followed_stream_brings_old_events_then_new_ones(rig: Rig) -> None:
    async with raw(rig) as stream:
        await stream.send_all(request_of(rig, "/api/v1/events?follow=1"))
        found = b""
        with trio.fail_after(30):
            while b"node-a registered" not in found:
                found += await stream.receive_some(65536)
            rig.fleet.events.add("node-lost", "node:node-b", "node-b is lost", clock=1.0)
            while b"node-b is lost" not in found:
                found += await stream.receive_some(65536)
    events = [msgspec.json.decode(line) for line in found.splitlines() if line.startswith(b"{")]
    assert [event["id"] for event in events] == [1, 2]


async def test_connection_close_closes(rig: Rig) -> None:
    async with raw(rig) as stream:
        await stream.send_all(request_of(rig, "/api/v1/status"))
        assert (await read_to_the_end(stream)).startswith(b"HTTP/1.1 200")


async def test_connection_close_closes_after_a_node_answered(rig: Rig) -> None:
    async with raw(rig) as stream:
        await stream.send_all(request_of(rig, "/api/v1/logs/node-a"))
        assert b"first line" in await read_to_the_end(stream)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 100_000, b"GET / HTTP/1.1\r\nHost\r\n\r\n"],
)
async def test_garbage_ends_its_connection_and_nothing_else(rig: Rig, garbage: bytes) -> None:
    async with raw(rig) as stream:
        with suppress(trio.BrokenResourceError):  # reset instead of closed, with what was not read still in the pipe
            await stream.send_all(garbage)
            await read_to_the_end(stream)
    async with rig.client() as http:
        assert (await http.get("/api/v1/status")).status_code == 200


async def test_plain_http_and_a_handshake_that_stops_harm_nobody(rig: Rig) -> None:
    plain = await trio.open_tcp_stream("127.0.0.1", rig.port)
    await plain.send_all(b"GET / HTTP/1.1\r\n\r\n")
    silent = await trio.open_tcp_stream("127.0.0.1", rig.port)
    async with rig.client() as http:
        assert (await http.get("/api/v1/status")).status_code == 200
    await silent.aclose()
    await plain.aclose()


async def test_a_websocket_is_refused(rig: Rig) -> None:
    async with raw(rig) as stream:
        await stream.send_all(
            b"GET /api/v1/status HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        with trio.fail_after(30):
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 403")


async def test_no_connection_leaks_after_many_requests(rig: Rig) -> None:
    async def tasks() -> int:
        await trio.testing.wait_all_tasks_blocked(0.05)
        return trio.lowlevel.current_statistics().tasks_living

    before = await tasks()
    for path in ("/api/v1/status", "/api/v1/logs/node-a", "/nothing", "/api/v1/events?after=99&wait=0.01"):
        async with rig.client() as http:
            await http.get(path)
    with trio.fail_after(IDLE - 5):
        while await tasks() > before:  # noqa: ASYNC110  # nobody tells when hypercorn's own tasks end
            await trio.sleep(0.05)


async def test_tls_older_than_1_3_is_refused(rig: Rig) -> None:
    context = ssl.create_default_context(cafile=str(rig.directory / CA))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", rig.port, ssl_context=context)
    with pytest.raises(trio.BrokenResourceError):
        await stream.do_handshake()
    await trio.aclose_forcefully(stream)


async def test_tokens_are_made_listed_and_revoked(rig: Rig) -> None:
    async with rig.client() as http:
        made = (await http.post("/api/v1/tokens", json={"seconds": 60, "node": "node-c", "note": "rack 7"})).json()
        listed = (await http.get("/api/v1/tokens")).json()["tokens"]
        revoked = (await http.delete(f"/api/v1/tokens/{made['id']}")).json()
        again = (await http.get("/api/v1/tokens")).json()["tokens"]
    assert made["token"].startswith("llmgw1.")
    assert [(t["id"], t["state"], t["node"], t["note"]) for t in listed] == [(made["id"], "open", "node-c", "rack 7")]
    assert made["token"] not in str(listed)
    assert "revoked" in revoked["text"]
    assert again[0]["state"] == "revoked"


async def test_revoking_a_node_ends_its_stream(rig: Rig) -> None:
    csr = pki.make_request(pki.make_key())
    await rig.admin.authority.issue("node-a", csr)
    async with rig.client() as http:
        assert len((await http.get("/api/v1/certs")).json()["certs"]) == 1
        response = await http.post("/api/v1/nodes/node-a/revoke", json={"why": "stolen"})
        assert response.json()["text"] == "node-a is shut out: 1 certificate revoked"
        with trio.fail_after(30):
            await rig.carried.wait()
        assert error(await http.get("/api/v1/logs/node-a")) == (503, "agent-gone")
