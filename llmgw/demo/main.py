"""The whole pair on one machine: plane, two nodes, real engines, and a chat with each of two models.

One model has a replica on each node; of the other one replica lies over both, as a model does that fits on none alone.

Everything lies under one directory and listens on loopback at ports that were free. Ctrl-C takes all of it down
again, the engines too: they outlive an agent by design, so they are stopped by the plane first.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec
import trio
from rich.console import Console

from llmgw.demo.processes import MARK, call, environment, leftovers, start, stop
from llmgw.errors import LlmgwError, TimedOut
from llmgw.files import make_directory
from llmgw.tinymodel import write_tiny

NODES = ("node-a", "node-b")
MODEL, WIDE = "tiny", "wide"
PROMPT = "The engine"
READY_WITHIN = 120.0


@attrs.frozen
class Ports:
    agents: int
    admin: int
    gateway: int


@attrs.frozen
class Demo:
    """Where this demo lives and how it speaks."""

    root: Path
    ports: Ports
    out: Console
    env: dict[str, str]

    @property
    def plane(self) -> Path:
        return self.root / "plane"

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    async def ctl(self, *args: str) -> str:
        return await call("llmgw", "ctl", "--dir", str(self.plane), *args, env=self.env)

    async def ctl_json(self, *args: str) -> Any:
        return msgspec.json.decode(await self.ctl(*args, "-o", "json"))


async def run(*, once: bool = False, directory: Path | None = None) -> None:
    """The demo from an empty directory to none. Raises LlmgwError when a step fails; the logs are kept then."""
    root = (directory or Path(tempfile.mkdtemp(prefix="llmgw-demo-"))).absolute()
    make_directory(root)
    out = Console(highlight=False)
    demo = Demo(root, Ports(*free_ports(3)), out, environment(str(root)))
    kept = directory is not None
    try:
        async with _fleet(demo):
            await _serve(demo)
            for model in (MODEL, WIDE):
                await chat(demo, model)
            if not once:
                _what_next(demo)
                await _interrupted()
                out.print()
    except LlmgwError:
        kept = True
        out.print(f"[dim]the logs are in {root}[/dim]")
        raise
    finally:
        if not kept:
            shutil.rmtree(root, ignore_errors=True)
    out.print("[green]stopped[/green]: no process of the demo is left")


@asynccontextmanager
async def _fleet(demo: Demo) -> AsyncIterator[None]:
    """A plane and its nodes, running; all of it is gone when the block ends."""
    processes: list[trio.Process] = []
    try:
        demo.out.print(f"[bold]llmgw demo[/bold] in {demo.root}")
        processes.append(await _plane(demo))
        for name in NODES:
            processes.append(await _node(demo, name))  # noqa: PERF401 - one started before a failure must be stopped
        yield
    finally:
        with trio.CancelScope(shield=True):
            await _down(demo, processes)


async def _plane(demo: Demo) -> trio.Process:
    await call("llmgw-plane", "init", "--dir", str(demo.plane), "--host", "127.0.0.1", env=demo.env)
    config = demo.plane / "plane.toml"
    _set(
        config,
        {
            "agents_listen": f"127.0.0.1:{demo.ports.agents}",
            "admin_listen": f"127.0.0.1:{demo.ports.admin}",
            "gateway_listen": f"127.0.0.1:{demo.ports.gateway}",
        },
    )
    with config.open("a") as settings:
        settings.write('\n[judgement]\nsettle = "2s"\n')
    process = await start("llmgw-plane", "run", "--config", str(config), log=demo.root / "plane.log", env=demo.env)
    await _until(demo, process, "the plane", _answers(demo.ports.admin), within=30)
    demo.out.print(f"  [green]plane[/green]   agents :{demo.ports.agents}, admin :{demo.ports.admin}, "
                   f"OpenAI API :{demo.ports.gateway}")  # fmt: skip
    return process


async def _node(demo: Demo, name: str) -> trio.Process:
    token = (await demo.ctl_json("token", "create", "--node", name))["token"]
    directory = demo.root / name
    await call(
        "llmgw-node",
        "join",
        f"wss://127.0.0.1:{demo.ports.agents}",
        "--token",
        token,
        "--name",
        name,
        "--dir",
        str(directory),
        env=demo.env,
    )
    low = 20000 + 500 * NODES.index(name)
    _set(directory / "node.toml", {"engine_ports": f"{low}-{low + 499}", "address": "127.0.0.1"})
    process = await start(
        "llmgw-node", "run", "--config", str(directory / "node.toml"), log=demo.root / f"{name}.log", env=demo.env
    )

    async def registered() -> bool:
        nodes = (await demo.ctl_json("nodes"))["nodes"]
        return any(node["id"] == name and node["connected"] for node in nodes)

    await _until(demo, process, name, registered, within=30)
    demo.out.print(f"  [green]{name}[/green]  joined with a certificate of its own")
    return process


async def _serve(demo: Demo) -> None:
    """The two models: written, applied, waited for."""
    tiny = await trio.to_thread.run_sync(write_tiny, demo.root / "tiny.gguf")
    wide = await trio.to_thread.run_sync(partial(write_tiny, demo.root / "wide.gguf", layers=6))
    wanted = demo.root / "models.toml"
    wanted.write_text(_wanted(MODEL, tiny, replicas=2) + "\n" + _wanted(WIDE, wide, nodes=2))
    await demo.ctl("apply", "-f", str(wanted))
    demo.out.print(f"  [green]{MODEL}[/green]    two replicas wanted on llama.cpp, and one of {WIDE} over both nodes")

    async def ready() -> bool:
        replicas = (await demo.ctl_json("replicas"))["replicas"]
        return len([replica for replica in replicas if replica["state"] == "ready"]) == 3

    try:
        await _until(demo, None, f"{MODEL} with two replicas and {WIDE} with one", ready, within=READY_WITHIN)
    except TimedOut as error:
        why = "\n".join([await demo.ctl("why", model) for model in (MODEL, WIDE)])
        raise TimedOut(f"{error.what}\n{why}") from None
    for replica in (await demo.ctl_json("replicas"))["replicas"]:
        nodes = " and ".join(shard["node"] for shard in replica["shards"])
        demo.out.print(f"           {replica['id']} is ready on {nodes}")
    demo.out.print()


def _wanted(name: str, source: Path, *, replicas: int = 1, nodes: int = 1) -> str:
    return (
        "[[models]]\n"
        f'name = "{name}"\n'
        f"replicas = {replicas}\n\n"
        "[models.profile]\n"
        'engine = "llamacpp"\n'
        f'source = "{source}"\n'
        f"nodes = {nodes}\n"
        "context = 4096\n"
        'args = ["-np", "4"]\n'
        'resources = { cpu_threads = 1, memory = "256MiB" }\n'
    )


async def chat(demo: Demo, model: str = MODEL) -> str:
    """One chat through the gateway, printed token by token; what was answered."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 60,
        "temperature": 0.7,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    said: list[str] = []
    demo.out.print(f"[bold]you[/bold]   {PROMPT} ...\n[bold]{model}[/bold]  ", end="")
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream("POST", f"{demo.gateway}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise LlmgwError(f"the chat was answered with {answer.status_code}: {answer.text}")
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for choice in msgspec.json.decode(line[6:]).get("choices", []):
                        text = choice.get("delta", {}).get("content") or ""
                        said.append(text)
                        demo.out.print(text, end="", markup=False)
                        await trio.sleep(0.02)  # a model this small speaks faster than anyone reads
    demo.out.print("\n")
    if not "".join(said).strip():
        raise LlmgwError("the model answered nothing")
    return "".join(said)


def _what_next(demo: Demo) -> None:
    ctl = f"{Path(sys.executable).parent / 'llmgw'} ctl --dir {demo.plane}"
    token = (demo.plane / "admin.token").read_text().strip()
    demo.out.print("[bold]Try next[/bold]")
    demo.out.print(
        f"  curl {demo.gateway}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "A replica"}}]}}\'\n'
        f"  {ctl} status\n  {ctl} replica {WIDE}\n  {ctl} logs node-a -f\n  {ctl} what-if drain node-a\n"
        f"  kill -9 one llama-server and watch:  {ctl} replicas --watch\n"
        f"  the page: https://127.0.0.1:{demo.ports.admin}/  (its certificate is the demo's own; token {token})\n",
        markup=False,
        soft_wrap=True,
    )
    demo.out.print("[dim]Ctrl-C stops everything.[/dim]")


async def _interrupted() -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


async def _down(demo: Demo, processes: list[trio.Process]) -> None:
    """Engines first, by the plane, as an operator would; then the daemons; then whatever still carries the mark."""
    demo.out.print("[dim]stopping the engines, the nodes and the plane[/dim]")
    with trio.move_on_after(20):
        try:
            empty = demo.root / "none.toml"
            empty.write_text("")
            await demo.ctl("apply", "-f", str(empty))
            await _until(demo, None, "an empty fleet", _empty(demo), within=15)
        except (LlmgwError, msgspec.MsgspecError, OSError):
            pass  # the plane is not there to do it: the mark finds what is left
    async with trio.open_nursery() as nursery:
        for process in processes[1:]:
            nursery.start_soon(stop, process)
    for process in processes[:1]:
        await stop(process)
    for pid in list(leftovers(demo.env[MARK])):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


async def _until(demo: Demo, process: trio.Process | None, what: str, holds: Any, *, within: float) -> None:
    """Wait until something holds; an error when the process ends first or the time is over."""
    with trio.move_on_after(within):
        while True:
            if process is not None and process.poll() is not None:
                raise LlmgwError(
                    f"{what} ended with status {process.returncode}", remedy=f"see the logs in {demo.root}"
                )
            try:
                if await holds():
                    return
            except LlmgwError:
                pass  # not yet
            await trio.sleep(0.2)
    raise TimedOut(f"{what} was not ready within {within:g} s")


def _empty(demo: Demo) -> Any:
    async def empty() -> bool:
        return bool((await demo.ctl_json("replicas"))["replicas"] == [])

    return empty


def _answers(port: int) -> Any:
    async def answers() -> bool:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            return False
        await stream.aclose()
        return True

    return answers


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def _set(path: Path, values: dict[str, str]) -> None:
    """Put top-level settings into a configuration file that `init` or `join` wrote, in front of its tables."""
    lines = [line for line in path.read_text().splitlines() if line.split("=")[0].strip() not in values]
    path.write_text("\n".join([f'{key} = "{value}"' for key, value in values.items()] + lines) + "\n")
