"""`llmgw ctl` against a real admin server: what it shows, what it changes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from click.testing import CliRunner, Result

from llmgw.ctl import client
from llmgw.ctl.main import ctl
from llmgw.pki import make_key, make_request
from llmgw.wire.facts import NodeId
from tests.plane.admin.rig import Rig, served
from tests.ports import free_ports

pytestmark = pytest.mark.real


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with served(tmp_path / "plane") as made:
        yield made


@pytest.fixture(autouse=True)
def _quiet_plane() -> Iterator[None]:
    """The plane runs in the process whose output the commands' is taken from: it logs elsewhere."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plane and command are one process here, which the machine may let wait."""
    monkeypatch.setattr(client, "CONNECT_WITHIN", 60.0)


@pytest.fixture(autouse=True)
def _no_other_plane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("LLMGW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


async def call(rig: Rig, *args: str, stdin: str | None = None) -> Result:
    """A command in a thread: it has an event loop of its own."""

    def run() -> Result:
        return CliRunner().invoke(ctl, ["--dir", str(rig.directory), *args], input=stdin, prog_name="llmgw ctl")

    return await trio.to_thread.run_sync(run)


async def ok(rig: Rig, *args: str, stdin: str | None = None) -> str:
    result = await call(rig, *args, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


async def asked(rig: Rig, *args: str) -> Any:
    return json.loads(await ok(rig, *args, "-o", "json"))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["status"], ["plane-1", "2 ready, 1 lost", "3 wanted", "1 bad", "12 requests"]),
        (["nodes"], ["gpu-01", "ready cordoned", "node-b", "lost no stream", "llamacpp b10068"]),
        (["models"], ["tiny", "big", "uncordon gpu-01"]),
        (["replicas"], ["tiny-0", "ready", "20001", "fetching weights 1.0 GiB of 4.0 GiB", "killed by SIGKILL"]),
        (["replicas", "--shards"], ["tiny-0-0", "big-0-0", "777 adopted"]),
        (["replica", "tiny-0"], ["node-a", "llama-server --port 20001", "killed by SIGKILL", "last words", "--run 1"]),
        (["replica", "big"], ["fetching weights 1.0 GiB of 4.0 GiB", "vllm"]),
        (["history", "tiny"], ["now", "the only one that is known"]),
        (["why", "big"], ["2 wanted, 1 placed", "has no GPUs (no NVIDIA driver", "bring node-b back", "big-0-0"]),
        (["why", "tiny"], ["every replica is ready"]),
        (["problems"], ["XID 79", "reset or replace it", "(known, 3d"]),
        (["node", "gpu-01"], ["NVIDIA H200", "400 Gb/s", "mlx5_0/1", "XID 79", "4242", "40.00 Gb/s", "EPYC"]),
        (["node", "gpu-01"], ["1m 32s ahead of the plane", "2 NVIDIA H200 GPUs, 18 NVLinks", "(confirmed", "c1.7"]),
        (["node", "show", "node-a"], ["no NVIDIA driver is loaded", "old-0-0", "31337"]),
        (["node", "node-b"], ["lost no stream", "127.0.0.2"]),
        (["logs", "node-a"], ["first line", "second \N{REPLACEMENT CHARACTER}[31mline"]),
        (["logs", "node-a", "tiny-0-0", "-n", "2"], ["first line"]),
        (["events"], ["node-registered", "node-a registered from 127.0.0.1"]),
        (["certs"], ["no certificate"]),
        (["token", "list"], ["no token"]),
    ],
)
async def test_a_person_sees(rig: Rig, args: list[str], expected: list[str]) -> None:
    shown = await ok(rig, *args)
    for words in expected:
        assert words in shown, shown


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (["status"], "plane"),
        (["nodes"], "nodes"),
        (["node", "gpu-01"], "gpus"),
        (["models"], "models"),
        (["replicas"], "replicas"),
        (["replica", "tiny"], "members"),
        (["replicas", "--shards"], "replicas"),
        (["history", "tiny"], "revisions"),
        (["scale", "tiny", "2"], "text"),
        (["why", "big"], "reasons"),
        (["problems"], "problems"),
        (["logs", "node-a"], "lines"),
        (["events"], "events"),
        (["certs"], "certs"),
        (["token", "list"], "tokens"),
        (["token", "create"], "token"),
        (["cordon", "node-a"], "text"),
    ],
)
async def test_a_program_reads_the_apis_json(rig: Rig, args: list[str], key: str) -> None:
    answer = await asked(rig, *args)
    assert answer["api"] == 1
    assert key in answer


async def test_options_may_stand_before_the_name_of_a_node(rig: Rig) -> None:
    assert json.loads(await ok(rig, "node", "-o", "json", "gpu-01"))["node"]["id"] == "gpu-01"


async def test_steering_a_node(rig: Rig) -> None:
    assert "takes no new shard" in await ok(rig, "cordon", "node-a")
    assert rig.fleet.world.value.nodes[NodeId("node-a")].cordoned
    await ok(rig, "uncordon", "node-a")
    assert not rig.fleet.world.value.nodes[NodeId("node-a")].cordoned
    await ok(rig, "drain", "node-a")
    assert rig.fleet.world.value.nodes[NodeId("node-a")].draining
    await ok(rig, "undrain", "node-a")
    assert not rig.fleet.world.value.nodes[NodeId("node-a")].draining
    assert await ok(rig, "node", "label", "gpu-01", "zone=b", "rack-") == "gpu-01 has the labels zone=b\n"
    assert await ok(rig, "node", "label", "gpu-01", "none-") == "gpu-01 has the labels zone=b\n"
    assert dict(rig.fleet.world.value.nodes[NodeId("gpu-01")].labels) == {"zone": "b"}
    await ok(rig, "node", "forget", "node-b")
    assert NodeId("node-b") not in rig.fleet.world.value.nodes


async def test_a_drain_has_its_own_deadline_and_says_what_is_left(rig: Rig) -> None:
    said = await ok(rig, "drain", "node-a", "--within", "10m")
    assert said == "node-a is draining: its replicas move elsewhere, and may finish requests for 10m\n"
    assert rig.fleet.world.value.nodes[NodeId("node-a")].drain_within == 600.0
    assert "may finish requests for 30s" in await ok(rig, "drain", "node-a")
    assert rig.fleet.world.value.nodes[NodeId("node-a")].drain_within is None
    assert "draining (1 left)" in await ok(rig, "nodes")
    shown = await ok(rig, "node", "node-a")
    assert "serves until its replacement is ready" in shown[shown.index("\nStill to leave") :]
    assert await ok(rig, "drain", "node-b") == "node-b is drained: nothing runs there\n"


async def test_scaling_a_model_holds_until_models_are_applied(rig: Rig) -> None:
    assert await ok(rig, "scale", "tiny", "3") == (
        "tiny is scaled from 1 to 3 replicas, until models are applied again\n"
    )
    assert await ok(rig, "scale", "tiny", "3") == "tiny has 3 replicas already\n"
    assert [model["wanted"] for model in (await asked(rig, "models"))["models"]] == [2, 3]
    assert "tiny: scaled from 1 to 3 replicas" in await ok(rig, "events")
    again = '[[models]]\nname = "tiny"\nengine = "llamacpp"\nsource = "/m/tiny.gguf"\n'
    assert "tiny would be changed: replicas 3 -> 1\n" in await ok(rig, "apply", "-f", "-", "--dry-run", stdin=again)
    assert "tiny changed: replicas 3 -> 1\n" in await ok(rig, "apply", "-f", "-", stdin=again)
    assert [model["wanted"] for model in (await asked(rig, "models"))["models"]][1:] == [1]


async def test_a_changed_profile_is_rolled_back_and_both_are_in_the_history(rig: Rig) -> None:
    text = '[[models]]\nname = "a/b"\nengine = "llamacpp"\nsource = "/m/x.gguf"\n'
    await ok(rig, "apply", "-f", "-", stdin=text)
    await ok(rig, "apply", "-f", "-", stdin=text + "context = 4096\n")
    assert "context none -> 4096" in await ok(rig, "history", "a/b")
    assert await ok(rig, "rollback", "a/b") == (
        "a/b goes back from revision 2 to 1, until models are applied again: context 4096 -> none\n"
    )
    revisions = (await asked(rig, "history", "a/b"))["revisions"]
    assert [(one["revision"], one["current"], one["changes"]) for one in revisions] == [
        (2, False, []),
        (1, True, ["context 4096 -> none"]),
    ]
    assert "from revision 1 to 2" in await ok(rig, "rollback", "a/b", "--to", "2")
    failed = await call(rig, "rollback", "a/b", "--to", "9")
    assert (failed.exit_code, "it can go back to 1" in failed.stderr) == (3, True)


async def test_acknowledging_a_problem(rig: Rig) -> None:
    problem = (await asked(rig, "problems"))["problems"][0]
    await ok(rig, "ack", problem["node"], problem["subject"], problem["code"], "--for", "2h")
    assert 6000 < (await asked(rig, "problems"))["problems"][0]["acknowledged_for"] <= 7200


async def test_a_token_is_made_alone_on_stdout_then_revoked(rig: Rig) -> None:
    result = await call(rig, "token", "create", "--ttl", "30m", "--node", "node-c")
    assert result.stderr.endswith("llmgw-node join wss://PLANE:7443 --token ... --name node-c\n")
    assert result.stdout.startswith("llmgw1.")
    assert len(result.stdout.split()) == 1
    assert "30m" in result.stderr
    found = (await asked(rig, "token", "list"))["tokens"][0]
    assert (found["node"], found["state"]) == ("node-c", "open")
    assert "revoked" in await ok(rig, "token", "revoke", found["id"])
    assert "revoked" in await ok(rig, "token", "list")


MODELS = '[[models]]\nname = "other"\n[models.profile]\nengine = "llamacpp"\nsource = "/m/x.gguf"\n'


async def test_applying_a_file_and_standard_input(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    assert "other would be added\n" in await ok(rig, "apply", "-f", str(path), "--dry-run")
    assert await ok(rig, "apply", "-f", str(path)) == "other added\nbig removed\ntiny removed\n"
    assert await ok(rig, "apply", "-f", "-", stdin=MODELS) == "nothing changed\n"
    unplaced = await call(rig, "replica", "other")
    words = "other has no replica that is placed: `llmgw ctl why other` says why"
    assert (unplaced.exit_code, words in unplaced.stderr) == (3, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[models]\n", "line 1"),
        (MODELS.replace("engine", "engin"), "engine"),
    ],
)
async def test_a_file_that_cannot_be_meant_is_answered_with_its_place(rig: Rig, text: str, words: str) -> None:
    result = await call(rig, "apply", "-f", "-", stdin=text)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["node", "node_a"], 3, "did you mean 'node-a'"),
        (["why", "nothing"], 3, "no model is called"),
        (["replica", "tinny-0"], 3, "did you mean 'tiny-0'"),
        (["scale", "tinny", "2"], 3, "did you mean 'tiny'"),
        (["scale", "tiny", "10001"], 2, "give 0 to 10000"),
        (["scale", "tiny", "--", "-1"], 2, "-1 replicas cannot be meant: give 0 to 10000"),
        (["scale", "tiny", "many"], 2, "'many' is not a valid integer"),
        (["rollback", "tiny"], 4, "never had another profile"),
        (["rollback", "nothing"], 3, "no model is called"),
        (["history", "nothing"], 3, "no model is called"),
        (["drain", "node-a", "--within", "soon"], 2, "is not a duration"),
        (["drain", "node-a", "--within", "9d"], 2, "a drain cannot take 9d: give 0 seconds to 7 days"),
        (["logs", "gpu-01"], 6, "no agent is connected for gpu-01"),
        (["logs", "node-a", "broken"], 8, "there is no source"),
        (["logs", "node-a", "none"], 3, "node-a: no log of none"),
        (["doctor", "node-a", "--only", "none"], 2, "node-a: there is no check"),
        (["events", "--node", "node_a"], 3, "did you mean 'node-a'"),
        (["why", ".."], 2, "'..' cannot be a name"),
        (["cordon", ""], 2, "'' cannot be a name"),
        (["node", "a/b"], 2, "'a/b' cannot be a name"),
        (["status", "--dir", "/nowhere"], 2, "--dir stands before the command: llmgw ctl --dir ..."),
        (["status", "--dirr", "/nowhere"], 2, "No such option '--dirr'"),
        (["apply", "-f", "/"], 2, "/ is a directory, where a file is due"),
        (["what-if", "apply", "/"], 2, "/ is a directory, where a file is due"),
        (["ack", "node-a", "node", "clock", "--for", "900d"], 2, "900d cannot be acknowledged: give 0 (ends it) to 90"),
        (["node", "forget", "node-a"], 4, "is connected"),
        (["node", "label", "node-a", "zone"], 2, "is no label"),
        (["label", "node-a", "my rack=7"], 2, "'my rack' cannot be a label's name: use 1 to 128 characters without"),
        (["label", "node-a", "k" * 3000 + "=7"], 2, "cannot be a label's name"),
        (["label", "node-a", "rack=" + "7" * 3000], 2, "the label rack cannot have the value '777"),
        (["apply", "-f", "/nowhere/models.toml"], 3, "/nowhere/models.toml is missing"),
        (["token", "create", "--ttl", "soon"], 2, "is not a duration"),
        (["token", "create", "--ttl", "0s"], 2, "a token cannot live for 0.0s"),
        (["token", "create", "--node", "bad name"], 2, "cannot be a name"),
        (["token", "revoke", "none"], 3, "there is no token"),
        (["ack", "node-a", "node", "nothing"], 3, "no open problem"),
        (["nodes", "--watch", "soon"], 2, "not 0.1 to 3600 seconds"),
        (["nonsense"], 2, "nonsense"),
    ],
)
async def test_what_goes_wrong_is_said_in_words_with_an_exit_status(
    rig: Rig, args: list[str], status: int, words: str
) -> None:
    result = await call(rig, *args)
    assert (result.exit_code, words in result.stderr) == (status, True), result.stderr
    assert "Traceback" not in result.stderr


async def test_an_error_is_json_too_when_json_was_asked_for(rig: Rig) -> None:
    result = await call(rig, "node", "nobody", "-o", "json")
    assert json.loads(result.stderr)["error"]["code"] == "not-found"
    assert result.stdout == ""


async def test_what_a_node_has_is_confirmed_and_shown_with_its_history(rig: Rig) -> None:
    done = await ok(rig, "node", "expect", "gpu-01")
    assert done.startswith("gpu-01 is expected to have 1 NVIDIA H200 GPU, 1 fabric ib port")
    shown = await ok(rig, "node", "gpu-01")
    assert "1 NVIDIA H200 GPU, 1 fabric ib port, 1 active at 400 Gb/s or more, 1024 GiB of memory (confirmed" in shown
    assert "gpu-01: confirmed: 1 NVIDIA H200 GPU" in shown[shown.index("\nLately") :]
    assert "node-expected" in await ok(rig, "events", "--node", "gpu-01")
    assert "node-expected" not in await ok(rig, "events", "--node", "node-a")
    assert "compared with its peers" in await ok(rig, "node", "expect", "gpu-01", "--clear")
    assert "(confirmed" not in await ok(rig, "node", "gpu-01")


async def test_doctor_shows_warnings_first_and_ends_with_their_status(rig: Rig) -> None:
    result = await call(rig, "doctor", "node-a")
    assert result.exit_code == 1
    assert result.stdout.index("clock") < result.stdout.index("memlock")
    assert "start chrony" in result.stdout


async def test_an_agent_too_old_for_doctor_is_named_at_once_with_its_version(tmp_path: Path) -> None:
    async with served(tmp_path / "plane", features=("fabric-test",)) as old:
        with trio.fail_after(120):
            result = await call(old, "doctor", "node-a")
        assert result.exit_code == 5
        assert "version 0.1.0" in result.stderr
        assert "'doctor'" in result.stderr


async def test_the_whole_screen_of_a_node_names_every_part_in_a_narrow_pipe(rig: Rig) -> None:
    shown = await ok(rig, "node", "gpu-01")
    for part in ("Problems", "Shards", "GPUs", "Foreign processes", "RDMA ports", "Fabric", "Disks", "Network"):
        assert f"\n{part}" in shown
    # In a pipe nothing is cut, however long.
    assert "GPU-5a0c1f0e-0000-4000-8000-000000000001" in shown


# --- finding the plane ---------------------------------------------------------------------------------


async def elsewhere(*args: str, env: dict[str, str] | None = None) -> Result:
    return await trio.to_thread.run_sync(lambda: CliRunner(env=env or {}).invoke(ctl, args, prog_name="llmgw ctl"))


async def test_the_environment_names_a_plane(rig: Rig) -> None:
    env = {"LLMGW_PLANE": rig.url, "LLMGW_CA": str(rig.directory / "ca.pem"), "LLMGW_TOKEN": rig.token}
    assert (await elsewhere("status", env=env)).exit_code == 0


async def test_a_certificate_serves_as_well_as_a_token(rig: Rig) -> None:
    options = ["--plane", rig.url, "--ca", str(rig.directory / "ca.pem"), "--cert", str(rig.admin_identity)]
    assert (await elsewhere(*options, "status")).exit_code == 0


async def test_a_plane_that_is_not_there(rig: Rig) -> None:
    options = ["--plane", f"https://127.0.0.1:{free_ports(1)[0]}", "--ca", str(rig.directory / "ca.pem")]
    result = await elsewhere(*options, "--token-file", str(rig.directory / "admin.token"), "status")
    assert result.exit_code == 6
    assert "cannot be reached: Connection refused" in result.stderr
    assert "is llmgw-plane running there?" in result.stderr


async def test_a_wrong_token(rig: Rig) -> None:
    env = {"LLMGW_TOKEN": "lga-wrong-wrong-wrong-wrong"}
    result = await elsewhere("--plane", rig.url, "--ca", str(rig.directory / "ca.pem"), "status", env=env)
    assert result.exit_code == 5
    assert "not an administrator's token" in result.stderr
    assert "lga-wrong" not in result.stderr


async def test_a_plane_of_another_ca_is_not_trusted(rig: Rig, tmp_path: Path) -> None:
    from llmgw.plane.init import init

    init(tmp_path / "other")
    env = {"LLMGW_TOKEN": rig.token}
    result = await elsewhere("--plane", rig.url, "--ca", str(tmp_path / "other" / "ca.pem"), "status", env=env)
    assert result.exit_code == 5
    assert "is not signed by this fleet's CA" in result.stderr


async def test_an_address_that_the_certificate_does_not_have(rig: Rig) -> None:
    env = {"LLMGW_TOKEN": rig.token}
    url = rig.url.replace("127.0.0.1", "127.0.0.2")
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.2")
    async with trio.open_nursery() as nursery:
        from llmgw.plane.admin.serve import serve_admin
        from llmgw.tls import ServerTls

        context = ServerTls(rig.directory / "ca.pem", rig.directory / "server.pem").context
        await nursery.start(serve_admin, rig.admin, listeners, context)
        url = f"https://127.0.0.2:{listeners[0].socket.getsockname()[1]}"
        result = await elsewhere("--plane", url, "--ca", str(rig.directory / "ca.pem"), "status", env=env)
        nursery.cancel_scope.cancel()
    assert result.exit_code == 5
    assert "add this one to `hosts` in plane.toml" in result.stderr


async def test_something_that_is_no_plane(rig: Rig) -> None:
    from functools import partial

    async def web(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.send_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, web, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        env = {"LLMGW_TOKEN": rig.token}
        result = await elsewhere("--plane", f"http://127.0.0.1:{port}", "status", env=env)
        nursery.cancel_scope.cancel()
    assert result.exit_code == 3
    assert "not as a plane does" in result.stderr


# --- as a process: signals, pipes, shells --------------------------------------------------------------

PROGRAM = [sys.executable, "-c", "import sys; from llmgw.cli import llmgw; sys.exit(llmgw())", "ctl"]


def started(rig: Rig, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, "--dir", str(rig.directory), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def test_ctrl_c_ends_with_130_and_withdraws_the_request_on_the_node(rig: Rig) -> None:
    with started(rig, "logs", "node-a", "slow", "-f") as process:
        with trio.fail_after(120):
            await rig.agent.hanging.wait()
            process.send_signal(signal.SIGINT)
            await rig.agent.withdrawn.wait()
            _, complaint = await trio.to_thread.run_sync(process.communicate)
    assert (process.returncode, complaint) == (130, b"")


async def test_events_are_followed_as_they_happen(rig: Rig) -> None:
    with started(rig, "events", "-f", "-o", "json") as process:
        assert process.stdout is not None
        with trio.fail_after(120):
            first = json.loads(await trio.to_thread.run_sync(process.stdout.readline))
            rig.fleet.events.add("node-lost", "node:node-b", "node-b is lost", clock=1.0)
            second = json.loads(await trio.to_thread.run_sync(process.stdout.readline))
            process.send_signal(signal.SIGINT)
            await trio.to_thread.run_sync(process.communicate)
    assert (first["kind"], second["text"], process.returncode) == ("node-registered", "node-b is lost", 130)


async def test_watching_with_json_is_a_line_each_time_until_the_reader_leaves(rig: Rig) -> None:
    with started(rig, "status", "-o", "json", "--watch=0.1") as process:
        assert process.stdout is not None
        with trio.fail_after(120):
            for _ in range(3):
                assert json.loads(await trio.to_thread.run_sync(process.stdout.readline))["plane"] == "plane-1"
            process.stdout.close()
            assert process.stderr is not None
            complaint = await trio.to_thread.run_sync(process.stderr.read)
            await trio.to_thread.run_sync(process.wait)
    assert complaint == b""
    assert process.returncode in (0, 141)


@pytest.mark.parametrize(
    "args", [["events", "-f"], ["events", "-f", "-o", "json"], ["nodes", "--watch=600"], ["logs", "node-a", "-f"]]
)
async def test_following_ends_when_the_reader_leaves_though_nothing_happens(rig: Rig, args: list[str]) -> None:
    with started(rig, *args) as process:
        assert process.stdout is not None
        with trio.fail_after(120):
            await trio.to_thread.run_sync(process.stdout.readline)
            process.stdout.close()
            assert process.stderr is not None
            complaint = await trio.to_thread.run_sync(process.stderr.read)
            await trio.to_thread.run_sync(process.wait)
    assert (complaint, process.returncode) == (b"", 0)


async def test_a_node_that_was_shut_out_is_not_said_to_have_no_agent_only(rig: Rig) -> None:
    await rig.admin.authority.issue("gpu-01", make_request(make_key()))
    assert "what it logs" in (await call(rig, "logs", "gpu-01")).stderr
    await ok(rig, "node", "revoke", "gpu-01", "--yes")
    for args in (["logs", "gpu-01"], ["doctor", "gpu-01"]):
        result = await call(rig, *args)
        assert (result.exit_code, "was revoked or has expired" in result.stderr) == (6, True)
    assert "was revoked or has expired" in await ok(rig, "weights", "gpu-01")


async def test_a_log_of_no_lines_is_empty_and_a_fleet_without_events_says_so(rig: Rig) -> None:
    assert await ok(rig, "logs", "node-a", "-n", "0") == ""
    assert await ok(rig, "events", "--node", "node-b") == "no event of node-b is kept\n"


async def test_a_watch_outlives_the_plane_and_says_since_when_it_is_gone(tmp_path: Path) -> None:
    async with served(tmp_path / "plane") as rig:
        process = started(rig, "nodes", "--watch=0.1")
        assert process.stdout is not None
        await trio.to_thread.run_sync(process.stdout.readline)
    with process:
        assert process.stderr is not None
        with trio.fail_after(120):
            said = b""
            while b"cannot be reached" not in said and b"ended the connection" not in said:
                said = await trio.to_thread.run_sync(process.stderr.readline)
                assert said
            process.send_signal(signal.SIGINT)
            await trio.to_thread.run_sync(process.communicate)
    assert process.returncode == 130


async def test_a_terminal_without_a_letter_shows_another_in_its_place(rig: Rig) -> None:
    await ok(rig, "label", "node-a", "size=groß")
    command = [*PROGRAM, "--dir", str(rig.directory), "nodes"]
    done = await trio.run_process(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_stdout=True, capture_stderr=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"size=gro?" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_the_completion_script_of_a_shell(shell: str) -> None:
    result = await elsewhere("completion", shell)
    assert result.exit_code == 0
    assert "COMPLETE" in result.stdout


async def completed(rig: Rig, words: str) -> list[str]:
    env = {**os.environ, "_LLMGW_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    # A shell's user would not wait for a busy machine.
    patient = "from llmgw.ctl import complete; complete._WITHIN = 60"
    program = [sys.executable, "-c", f"{patient}; from llmgw.cli import llmgw; llmgw()"]
    result = await trio.run_process(program, env=env, capture_stdout=True)
    return [line.split(",", 1)[1] for line in result.stdout.decode().split()]


async def test_names_of_nodes_and_models_are_completed(rig: Rig) -> None:
    ctl = f"llmgw ctl --dir {rig.directory}"
    assert await completed(rig, f"{ctl} cordon node-") == ["node-a", "node-b"]
    assert await completed(rig, f"{ctl} why t") == ["tiny"]
    assert await completed(rig, f"{ctl} node gp") == ["gpu-01"]
    assert await completed(rig, f"{ctl} logs node-a t") == ["tiny-0-0"]
    assert await completed(rig, f"{ctl} replica ti") == ["tiny-0"]
    for command in ("scale", "rollback", "history"):
        assert await completed(rig, f"{ctl} {command} t") == ["tiny"]
    assert await completed(rig, f"{ctl} rollback tiny --to ") == ["1"]
    assert await completed(rig, f"{ctl} rollback .. --to ") == []
    assert await completed(rig, f"{ctl} logs node-a tiny-0-0 --run ") == ["1", "2"]
    assert await completed(rig, f"{ctl} logs node-a --run ") == []
    assert await completed(rig, f"{ctl} what-if lose node-") == ["node-a", "node-b"]
    assert await completed(rig, f"{ctl} fetch t") == ["tiny"]
    assert await completed(rig, f"{ctl} token create --node gp") == ["gpu-01"]
    problem = (await asked(rig, "problems"))["problems"][0]
    assert problem["subject"] in await completed(rig, f"{ctl} ack {problem['node']} ")
    assert problem["code"] in await completed(rig, f"{ctl} ack {problem['node']} {problem['subject']} ")
    token = (await asked(rig, "token", "create"))["id"]
    assert await completed(rig, f"{ctl} token revoke ") == [token]


async def test_completion_without_a_plane_is_silent() -> None:
    env = {**os.environ, "_LLMGW_COMPLETE": "bash_complete", "COMP_WORDS": "llmgw ctl cordon n", "COMP_CWORD": "3"}
    program = [sys.executable, "-c", "from llmgw.cli import llmgw; llmgw()"]
    result = await trio.run_process(program, env=env, capture_stdout=True, capture_stderr=True)
    assert (result.stdout.strip(), result.stderr) == (b"", b"")
