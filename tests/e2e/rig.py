"""The pair as an operator has it: every part a process of its own, started by its own command line.

Real TLS, real files, real engines on the CPU. A test kills, stops and restarts what it likes; when the block ends, no
process of the rig is left.
"""

from __future__ import annotations

import json
import shutil
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from llmgw.demo.processes import call, environment, leftovers, start, stop
from llmgw.tinymodel import write_tiny
from tests.leftovers import alive, end
from tests.ports import free_ports, of_a_fleet

#: Silence is noticed sooner here; everything else is as it is shipped, or nearly. A process that a busy machine lets
#: stand still for seconds is not silent, and an agent that takes its time to begin again must not be lost for that.
QUICK = """
[judgement]
settle = "20s"
unreachable_after = "8s"
lost_after = "90s"
quiet = "3s"
"""
#: For those who wait for a loss, and when it comes: seconds of silence.
LOST_AFTER = 12.0
SOON_LOST = QUICK.replace("90s", f"{LOST_AFTER:g}s")
#: A limit that nothing good comes near to, in seconds: an agent's pauses between its tries alone grow to half a minute.
WITHIN = 90.0

MODEL = """
[[models]]
name = "{name}"
replicas = {replicas}
[models.profile]
engine = "llamacpp"
source = "{source}"
context = 2048
args = ["-np", "4"]
resources = {{ cpu_threads = 1, memory = "128MiB" }}
"""


@attrs.define
class Rig:
    """A plane and nodes in processes of their own, and how to reach them."""

    root: Path
    agents: int
    admin: int
    serve: int
    mark: str
    settings: str = QUICK
    top: str = ""
    plane: trio.Process | None = None
    nodes: dict[str, trio.Process] = attrs.field(factory=dict)
    gateways: trio.Process | None = None
    _client: httpx.AsyncClient | None = None

    @property
    def directory(self) -> Path:
        return self.root / "plane"

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.serve}"

    @property
    def env(self) -> dict[str, str]:
        return environment(self.mark)

    @property
    def api(self) -> httpx.AsyncClient:
        """The admin API, as an administrator with the bearer token."""
        if self._client is None:
            token = (self.directory / "admin.token").read_text().strip()
            self._client = httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{self.admin}/api/v1/",
                verify=ssl.create_default_context(cafile=str(self.directory / "ca.pem")),
                headers={"Authorization": f"Bearer {token}"},
                timeout=WITHIN,
                trust_env=False,
            )
        return self._client

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.api.get(path, params=query)
        answer.raise_for_status()
        return answer.json()

    # --- starting ------------------------------------------------------------------------------------

    async def make_plane(self) -> None:
        await call("llmgw-plane", "init", "--dir", str(self.directory), "--host", "127.0.0.1", env=self.env)
        (self.directory / "plane.toml").write_text(
            f'name = "test"\nhosts = ["127.0.0.1"]\nagents_listen = "127.0.0.1:{self.agents}"\n'
            f'admin_listen = "127.0.0.1:{self.admin}"\ngateway_listen = "127.0.0.1:{self.serve}"\n'
            f'heartbeat = "0.5s"\n{self.top}\n{self.settings}'
        )

    async def forget_plane(self) -> None:
        """All that the plane knew is gone; the next one is another."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        await trio.to_thread.run_sync(shutil.rmtree, self.directory)

    async def start_plane(self) -> None:
        config = str(self.directory / "plane.toml")
        self.plane = await start("llmgw-plane", "run", "--config", config, log=self.root / "plane.log", env=self.env)
        await self.until(self.answers, what="the plane answers")

    async def answers(self) -> bool:
        if self.plane is not None and self.plane.poll() is not None:
            raise AssertionError(f"the plane ended:\n{self.log('plane')}")
        try:
            return (await self.api.get("status")).status_code == 200
        except httpx.TransportError:
            return False

    async def start_gateways(self, workers: int) -> None:
        config = str(self.directory / "plane.toml")
        args = ["gateway", "--config", config, "--workers", str(workers)]
        self.gateways = await start("llmgw-plane", *args, log=self.root / "gateways.log", env=self.env)

        async def there() -> bool:
            try:
                async with patient() as client:
                    return (await client.get(f"{self.gateway}/health")).status_code == 200
            except httpx.TransportError:
                return False

        await self.until(there, what="the gateways answer")

    async def join(self, name: str) -> None:
        answer = await self.api.post("tokens", json={"node": name})
        answer.raise_for_status()
        url = f"wss://127.0.0.1:{self.agents}"
        directory = self.root / name
        token = answer.json()["token"]
        args = ["join", url, "--token", token, "--name", name, "--dir", str(directory)]
        await call("llmgw-node", *args, env=self.env)
        among = len(list(self.root.glob("n*/node.toml")))
        ports = of_a_fleet()[300 * among : 300 * (among + 1)]
        config = directory / "node.toml"
        config.write_text(f'engine_ports = "{ports[0]}-{ports[-1]}"\naddress = "127.0.0.1"\n' + config.read_text())

    async def start_node(self, name: str) -> None:
        config = str(self.root / name / "node.toml")
        self.nodes[name] = await start(
            "llmgw-node", "run", "--config", config, log=self.root / f"{name}.log", env=self.env
        )

    async def apply(self, replicas: int, name: str = "tiny", source: Path | None = None) -> None:
        source = source or self.root / "tiny.gguf"
        if not source.exists():
            write_tiny(source)
        text = MODEL.format(name=name, replicas=replicas, source=source) if replicas else ""
        answer = await self.api.post("apply", content=text)
        assert answer.status_code == 200, answer.text

    # --- looking -------------------------------------------------------------------------------------

    async def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get("replicas"))["replicas"]
        return found

    async def ready(self, count: int) -> bool:
        """Are exactly so many replicas placed, and are all of them ready?"""
        states = [replica["state"] for replica in await self.replicas()]
        return states == ["ready"] * count

    async def adopted(self, count: int) -> bool:
        """The same, and has each engine been taken over from the agent before?"""
        return await self.ready(count) and all(shard["adopted"] for shard in (await self.shards()).values())

    async def shards(self) -> dict[str, dict[str, Any]]:
        return {shard["id"]: shard for replica in await self.replicas() for shard in replica["shards"]}

    async def node(self, name: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = (await self.get("nodes"))["nodes"]
        return next((row for row in rows if row["id"] == name), {"stage": "unknown", "connected": False})

    async def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in (await self.get("events", after=0, limit=10000))["events"] if event["kind"] == kind]

    def engines(self) -> list[int]:
        """Pids of the engines of this rig: servers, and the members that serve them."""
        return sorted(
            pid for pid, words in self.commands().items() if words[0].endswith((b"llama-server", b"rpc-server"))
        )

    def commands(self) -> dict[int, list[bytes]]:
        """The command line of each living process of this rig."""
        found = {}
        for pid in leftovers(self.mark):
            with suppress(OSError):  # it has ended
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if alive(pid):
                    found[pid] = words
        return found

    def log(self, name: str, lines: int = 40) -> str:
        return "\n".join((self.root / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    async def until(
        self, holds: Callable[[], Awaitable[bool]], *, within: float = WITHIN, what: str = "", every: float = 0.1
    ) -> float:
        """Wait until something holds; how long it took."""
        began = time.monotonic()
        while not await holds():
            if time.monotonic() - began > within:
                logs = "\n".join(f"--- {path.name}\n{self.log(path.stem)}" for path in sorted(self.root.glob("*.log")))
                raise AssertionError(f"not within {within:g} s: {what}\n{logs}")
            await trio.sleep(every)
        return time.monotonic() - began

    async def until_connected(self, *names: str) -> None:
        async def connected() -> bool:
            return all([(await self.node(name))["connected"] for name in names])

        await self.until(connected, what=f"{', '.join(names)} connected")

    async def chat(self, client: httpx.AsyncClient, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 24, "messages": [{"role": "user", "content": "The node"}]} | more
        return await client.post(f"{self.gateway}/v1/chat/completions", json=body)

    async def chats(self, client: httpx.AsyncClient) -> bool:
        """Is a chat answered?"""
        return (await self.chat(client)).status_code == 200

    # --- breaking --------------------------------------------------------------------------------------

    async def kill(self, process: trio.Process, number: signal.Signals = signal.SIGKILL) -> None:
        process.send_signal(number)
        await process.wait()

    async def down(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        for process in [*self.nodes.values(), *filter(None, [self.gateways, self.plane])]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                await stop(process, within=1)
        # One that was just being started is seen the next time, and what was killed is gone only a moment later.
        with trio.move_on_after(WITHIN):
            while left := list(leftovers(self.mark)):
                end(left)
                await trio.sleep(0.02)


def patient(within: float = WITHIN) -> httpx.AsyncClient:
    """A client of the gateway. No proxy of this machine's environment stands between them."""
    return httpx.AsyncClient(timeout=within, trust_env=False)


@attrs.define
class Traffic:
    """Chats that go on in the background: what was answered, and what failed."""

    good: int = 0
    failures: list[str] = attrs.field(factory=list)
    stopping: bool = False

    async def run(self, rig: Rig) -> None:
        async with patient() as client:
            while not self.stopping:
                try:
                    answer = await rig.chat(client)
                except httpx.HTTPError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    continue
                if answer.status_code == 200 and answer.json()["choices"]:
                    self.good += 1
                else:
                    self.failures.append(f"{answer.status_code}: {answer.text[:200]}")
                await trio.sleep(0.02)

    async def reached(self, count: int) -> bool:
        """Were so many chats answered well?"""
        await trio.lowlevel.checkpoint()
        return self.good >= count


@asynccontextmanager
async def traffic(rig: Rig, streams: int = 2) -> AsyncIterator[Traffic]:
    """Chats through the gateway while the block runs."""
    talk = Traffic()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(talk.run, rig)
        yield talk
        talk.stopping = True


@asynccontextmanager
async def rig(
    root: Path,
    nodes: int = 2,
    *,
    replicas: int = 0,
    settings: str = QUICK,
    top: str = "",
    gateways: int = 0,
    hold_within: float = WITHIN,
) -> AsyncIterator[Rig]:
    """A running fleet. With `gateways`, these relay in processes of their own and the plane does not."""
    agents, admin, serve = free_ports(3)
    settings += f"\n[gateway]\ninside = {str(not gateways).lower()}\nhold_within = {hold_within}\n"
    made = Rig(root, agents, admin, serve, json.dumps(str(root)), settings, top)
    try:
        await made.make_plane()
        await made.start_plane()
        if gateways:
            await made.start_gateways(gateways)
        names = [f"n{n}" for n in range(1, nodes + 1)]
        for name in names:
            await made.join(name)
            await made.start_node(name)
        await made.until_connected(*names)
        if replicas:
            await made.apply(replicas)
            await made.until(lambda: made.ready(replicas), what=f"{replicas} replicas ready")
        yield made
    finally:
        with trio.CancelScope(shield=True):
            await made.down()
