"""Trying an engine's program on this machine, before any shard depends on it.

That a program prints its version proves little: a build for another CPU does so and dies on its first
multiplication. So llama.cpp is made to load a tiny model, and engines in Python are made to import themselves, look
for the devices, and load a tiny model where there is room for one.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import httpx
import trio

from llmgw.errors import Failed, NotFound
from llmgw.node.engines import Engine
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.environment import PROBE, STATE, scrubbed
from llmgw.node.engines.places import Whereabouts
from llmgw.node.lines import clean, last
from llmgw.node.run import REAP_WITHIN, NotStarted
from llmgw.node.runfile import run_to_file

PROBE_SECONDS = 60.0
#: Runs in the engine's own Python, which has nothing of ours.
_CHILD = Path(__file__).with_name("trial_child.py")
TOLD = "llmgw-trial: "


class Trial:
    """Tries programs; `state` is the agent's directory, by which a later agent finds what this one left behind."""

    def __init__(self, state: Path) -> None:
        self._state = state.absolute()

    async def server(self, engine: Engine, place: Whereabouts) -> str:
        """llama.cpp's server: its version, after it has loaded a tiny model. Raises NotFound, Failed."""
        await _there(engine, place)
        version = place.version or await self._asked(engine, place)
        with tempfile.TemporaryDirectory(prefix="llmgw-probe-") as folder:
            await self._load(engine, place, Path(folder))
        return version

    async def python(self, engine: Engine, place: Whereabouts, python: str, folder: Path, *, within: float) -> str:
        """An engine that is a Python package: what it did, in words. `python` is its own. Raises NotFound, Failed.

        `folder` is there for the model, and has room for it. Output goes to a file in it, so that it can be read.
        """
        await _there(engine, place)
        output = folder / "output"
        env = self.environment(place) | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # It looks for the GPU with the most room itself.
        del env["CUDA_VISIBLE_DEVICES"]
        with output.open("wb") as file:
            argv = (python, "-I", str(_CHILD), engine.name)
            try:
                status = await run_to_file(argv, file.fileno(), env=env, cwd=folder, limit=within)
            except NotStarted as error:
                raise Failed(f"{engine.name}: {error.what}", remedy="check it") from None
        data = output.read_bytes()[-(1 << 20) :]
        told = [line.removeprefix(TOLD) for line in clean(data) if line.startswith(TOLD)]
        if told and status == 0:
            return _did(told[-1])
        if status is None:
            raise Failed(
                f"{engine.name}: it was not tried to the end within {within:.0f} s", remedy="see installs.try_within"
            )
        raise self._failure(engine, place, data, status)

    def environment(self, place: Whereabouts) -> dict[str, str]:
        # Marked, so that an agent started later finds and ends what a killed one left behind.
        return {
            **scrubbed(os.environ),
            **place.env,
            STATE: str(self._state),
            PROBE: "1",
            "GGML_NO_BACKTRACE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GGML_VK_VISIBLE_DEVICES": "",
            "OMP_WAIT_POLICY": "passive",
        }

    async def _asked(self, engine: Engine, place: Whereabouts) -> str:
        with trio.move_on_after(PROBE_SECONDS):
            try:
                done = await trio.run_process(
                    [*place.command, "--version"],
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                    env=self.environment(place),
                )
            except OSError as error:
                raise _cannot(engine, place.command[0], error) from None
            text = "\n".join(clean(done.stdout + done.stderr))
            if done.returncode:
                raise self._failure(engine, place, done.stdout + done.stderr, done.returncode)
            found = re.search(r"version:\s*(\S+)(?:\s+\(([^)]+)\))?", text)
            return f"{found[1]}-{found[2]}" if found and found[2] else found[1] if found else ""
        raise Failed(
            f"{engine.name}: {place.command[0]} --version did not end within {PROBE_SECONDS:.0f} s",
            remedy="run it by hand",
        )

    async def _load(self, engine: Engine, place: Whereabouts, folder: Path) -> None:
        """Load a tiny model and wait until it would serve: only this executes the code that needs the right CPU."""
        model = folder / "tiny.gguf"
        # By a process of its own: what it takes of memory is given back, and the agent stays small.
        write = [sys.executable, "-P", "-m", "llmgw.tinymodel", str(model)]
        written = await trio.run_process(
            write, capture_stdout=True, capture_stderr=True, check=False, env=self.environment(place)
        )
        if written.returncode:
            raise Failed(
                f"{engine.name}: the model to try it with cannot be written: {' '.join(last(written.stderr, 1))}",
                remedy=f"is there room in {folder.parent}?",
            )
        socket, output = folder / "s.sock", folder / "output"
        words = (
            *("-m", str(model), "--host", str(socket), "-t", "1", "-c", "64", "-np", "1"),
            *("-dev", "none", "--no-ui", "--offline"),
        )
        with output.open("wb") as file:
            async with trio.open_nursery() as nursery:
                try:
                    process = await trio.lowlevel.open_process(
                        [*place.command, *words],
                        stdin=None,
                        stdout=file,
                        stderr=file,
                        env=self.environment(place),
                        cwd=folder,
                    )
                except OSError as error:
                    raise _cannot(engine, place.command[0], error) from None
                try:
                    serving = trio.Event()
                    nursery.start_soon(_served, socket, serving, nursery.cancel_scope)
                    with trio.move_on_after(PROBE_SECONDS):
                        await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
                    # One that hangs in a driver is not waited for: the agent must be able to stop.
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + REAP_WITHIN):
                        await process.wait()
                    nursery.cancel_scope.cancel()
        if serving.is_set():
            return
        if process.returncode == -9:
            raise Failed(
                f"{engine.name}: {place.command[0]} did not load a tiny model within {PROBE_SECONDS:.0f} s",
                remedy="run it by hand",
            )
        raise self._failure(engine, place, output.read_bytes(), process.returncode or 0)

    def _failure(self, engine: Engine, place: Whereabouts, output: bytes, status: int) -> Failed:
        ended = Ended(exit_code=status) if status >= 0 else Ended(signal=-status)
        cause = engine.cause(clean(output), ended)
        lines = " / ".join(last(output, 2))
        what = f"{engine.name}: {place.command[0]} {ended}"
        if cause is None:
            return Failed(f"{what}, saying {lines!r}" if lines else what, remedy="run it by hand")
        return Failed(f"{what}: {cause.text}", remedy=cause.remedy)


def _did(told: str) -> str:
    """What a trial says that it did; engines print what they like, so it may be anything."""
    try:
        words = json.loads(told)
    except ValueError:
        words = None
    return str(words["did"]) if isinstance(words, dict) and "did" in words else "it was tried"


async def _there(engine: Engine, place: Whereabouts) -> None:
    if not await trio.to_thread.run_sync(place.runnable):
        raise NotFound(
            f"{engine.name}: {place.command[0]} is not a program that this agent may run",
            remedy="check the node's settings",
        )


def _cannot(engine: Engine, program: str, error: OSError) -> Failed:
    return Failed(f"{engine.name}: {program} cannot be executed: {error.strerror}", remedy="check it")


async def _served(socket: Path, serving: trio.Event, scope: trio.CancelScope) -> None:
    """Ask until the answer is yes; then say so and end the scope."""
    # Plain HTTP over a socket file: without `verify` a bundle of certificate authorities would be read into memory.
    transport = httpx.AsyncHTTPTransport(uds=str(socket), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", trust_env=False, timeout=5.0) as client:
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    serving.set()
                    scope.cancel()
                    return
            except httpx.HTTPError:
                pass
            await trio.sleep(0.05)
