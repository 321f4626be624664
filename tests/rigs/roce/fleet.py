"""A plane on this machine and a whole agent in each guest: as an operator has them, only slower."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import attrs
import httpx
import trio

from llmgw.demo.processes import command, environment
from tests.ports import free_ports
from tests.rigs.roce.guests import Guest

PROJECT = Path(__file__).parents[3]
#: The host's loopback, as guests reach it.
HOST = "10.0.2.2"
#: Seconds. An agent starts slowly in a guest: its modules come over 9p into an emulated CPU.
START_WITHIN = 900.0
#: Seconds for the longest that is asked of a fleet here, all attempts of a bandwidth test included.
BOUND = 900.0
#: What an emulated link carries is a hundredth of its rate, so that is what is good here.
GOOD = ("--good", "0.00001", "--fair", "0.000001")
#: How a test fails whose figure perftest had no clock for.
NO_CLOCK = ("clock", "could-not-measure")
#: Few in flight: an emulated CPU sends each by hand. And retries for 4.3 s instead of half a second: one guest may get
#: no CPU for so long while the other does. What is lost on the way then costs more, too.
FEW = ("-t", "8", "-u", "17")
QUICK = ("--size", "4KiB", "--queue-pairs", "1", f"--perftest-option={' '.join(FEW)}", "--seconds", "4")


@attrs.define
class Fleet:
    """The plane, its nodes a and b, and ctl."""

    root: Path
    agents: int
    admin: int
    serve: int
    a: Guest
    b: Guest
    #: Whether its nodes are reached at their first rail's address, as members of a replica must be. Bandwidth tests
    #: then meet there, too, and a cut of that rail would be theirs.
    on_rails: bool = False
    _processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    @property
    def directory(self) -> Path:
        return self.root / "plane"

    @property
    def home(self) -> str:
        """Where an agent lives in its guest's share."""
        return "agent-on-rails" if self.on_rails else "agent"

    @property
    def env(self) -> Mapping[str, str]:
        return environment(str(self.root))

    # --- starting --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._call("llmgw-plane", "init", "--dir", str(self.directory), "--host", "127.0.0.1")
        (self.directory / "plane.toml").write_text(
            f'name = "rig"\nhosts = ["127.0.0.1", "{HOST}"]\nagents_listen = "127.0.0.1:{self.agents}"\n'
            f'admin_listen = "127.0.0.1:{self.admin}"\ngateway_listen = "127.0.0.1:{self.serve}"\nheartbeat = "1s"\n'
        )
        with (self.root / "plane.log").open("wb") as log:
            run = command("llmgw-plane", "run", "--config", str(self.directory / "plane.toml"))
            self._processes.append(
                subprocess.Popen(run, stdin=DEVNULL, stdout=log, stderr=STDOUT, env=self.env, start_new_session=True)
            )
        self._until(self._answers, 180, "the plane answers")
        for guest in (self.a, self.b):
            self._join(guest)
        self._until(self._connected, START_WITHIN, "both agents are connected")

    def _call(self, program: str, *args: str) -> None:
        done = subprocess.run(
            command(program, *args),
            env=self.env,
            capture_output=True,
            text=True,
            stdin=DEVNULL,
            check=False,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr

    def _join(self, guest: Guest) -> None:
        """Join here, where it is quick, and let the agent run there."""
        with self.api() as api:
            answer = api.post("tokens", json={"node": guest.name})
            answer.raise_for_status()
        home = guest.share / self.home
        url = f"wss://127.0.0.1:{self.agents}"
        self._call(
            "llmgw-node", "join", url, "--token", answer.json()["token"], "--name", guest.name, "--dir", str(home)
        )
        config = home / "node.toml"
        # An engine by its name alone: where a replica would go is to be seen, and nothing is loaded in a guest.
        engine = '\n[engines.vllm]\ncommand = ["/bin/true"]\n'
        own = f'address = "{guest.address(0)}"\n' if self.on_rails else ""
        config.write_text(f"{own}memory_reserve = 0\n" + config.read_text().replace("127.0.0.1", HOST) + engine)
        agent = command("llmgw-node", "run", "--config", f"/share/{self.home}/node.toml")
        # The agent lives as long as the guest: in a session of its own, with its log where this machine sees it.
        script = 'exec setsid "$@" >/share/agent.log 2>&1 </dev/null &'
        trio.run(lambda: guest.run("sh", "-c", script, "sh", *agent, env={"PYTHONPATH": str(PROJECT)}))

    def api(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"https://127.0.0.1:{self.admin}/api/v1/",
            verify=ssl.create_default_context(cafile=str(self.directory / "ca.pem")),
            headers={"Authorization": f"Bearer {(self.directory / 'admin.token').read_text().strip()}"},
            timeout=60,
        )

    def _answers(self) -> bool:
        assert self._processes[0].poll() is None, (self.root / "plane.log").read_text()
        try:
            with self.api() as api:
                return api.get("status").status_code == 200
        except (httpx.TransportError, OSError):
            return False

    def _connected(self) -> bool:
        with self.api() as api:
            rows = {row["id"]: row for row in api.get("nodes").json()["nodes"]}
        return all(rows.get(guest.name, {}).get("connected") for guest in (self.a, self.b))

    def _until(self, holds: Callable[[], bool], within: float, what: str) -> None:
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > within:
                logs = [self.root / "plane.log", *(guest.share / "agent.log" for guest in (self.a, self.b))]
                told = "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())
                raise AssertionError(f"not within {within:g} s: {what}\n{told}")
            time.sleep(0.5)

    def stop(self) -> None:
        try:
            for guest in (self.a, self.b):
                trio.run(guest.sh, f"pkill -KILL -f 'share/{self.home}/[n]ode.toml' || true")
        finally:
            for process in self._processes:
                process.terminate()
                process.wait(timeout=60)

    # --- asking ----------------------------------------------------------------------------------------

    def ctl(self, *args: str) -> list[str]:
        return command("llmgw", "ctl", "--dir", str(self.directory), *args)

    async def test(self, *args: str) -> dict[str, Any]:
        """The result of `fabric-test a b`, as -o json gives it.

        An emulated processor of a busy machine is often too uneven a clock for perftest, which says so: again then.
        """
        run = self.ctl("fabric-test", "a", "b", *QUICK, *args, "-o", "json")
        with trio.fail_after(BOUND):
            while True:
                done = await trio.run_process(
                    run, env=dict(self.env), capture_stdout=True, capture_stderr=True, check=False, stdin=DEVNULL
                )
                assert done.stdout, done.stderr.decode()
                result: dict[str, Any] = json.loads(done.stdout)
                if not any(rail.get("failure", {}).get("code") in NO_CLOCK for rail in result["rails"]):
                    return result

    async def port(self, guest: Guest, device: str) -> dict[str, Any]:
        """A port as the plane knows it."""

        def ask() -> dict[str, Any]:
            with self.api() as api:
                ports = api.get(f"nodes/{guest.name}").json()["ports"]
            return next(port for port in ports if port["device"] == device)

        return await trio.to_thread.run_sync(ask)


@contextmanager
def fleet(root: Path, pair: tuple[Guest, Guest], *, on_rails: bool = False) -> Iterator[Fleet]:
    """A running fleet over two guests."""
    os.makedirs(root, exist_ok=True)
    agents, admin, serve = free_ports(3)
    made = Fleet(root, agents, admin, serve, *pair, on_rails=on_rails)
    try:
        made.start()
        yield made
    finally:
        made.stop()
