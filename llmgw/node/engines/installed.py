"""Which engines this node has: those that were here (the settings' command, PATH), and those the agent installed.

Several versions stand side by side. `found` chooses among them for a shard: the version it asks for, else the one that
the plane prefers, else whatever works. Every program is tried once before it counts, and again when it changed; one
that did not work also after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from llmgw.cell import Cell
from llmgw.errors import Failed, LlmgwError, NotFound
from llmgw.node.engines import Engine, Found
from llmgw.node.engines.places import Whereabouts, whereabouts
from llmgw.node.engines.trial import Trial
from llmgw.node.installs.shelf import Kept, Shelf
from llmgw.wire.facts import EngineInstall, InstallState, same_version

#: Of a program that the agent did not install.
OUTSIDE = ""
#: Seconds after which a program that did not work is tried again: the machine may have been busy, or its disk full.
AGAIN = 600.0
Key = tuple[str, str]  # engine, version


@attrs.frozen
class Tried:
    """A program that was tried, and what came of it. `words` say what it did, `at` is when, on trio's clock."""

    mark: tuple[object, ...]
    place: Whereabouts
    outcome: Found | LlmgwError
    at: float
    words: str = ""

    def counts(self, mark: tuple[object, ...], now: float) -> bool:
        """Whether the program needs not be tried again."""
        return self.mark == mark and (isinstance(self.outcome, Found) or now - self.at < AGAIN)


class Installed:
    """The engines of this node, found and tried. `changed` moves when what `installs` says has changed."""

    def __init__(
        self,
        adapters: Iterable[Engine],
        *,
        commands: Mapping[str, Sequence[str]] | None = None,
        environments: Mapping[str, Mapping[str, str]] | None = None,
        state: Path,
        shelf: Shelf | None = None,
    ) -> None:
        """`commands` and `environments` are what the node's settings say of an engine, by its name."""
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._commands = dict(commands or {})
        self._environments = dict(environments or {})
        self._shelf = shelf or Shelf(state / "engines")
        self._trial = Trial(state)
        self._tried: dict[Key, Tried] = {}
        self._trying = {name: trio.Lock() for name in self._adapters}
        self._preferred: dict[str, str] = {}
        self._coming: dict[Key, EngineInstall] = {}
        self.changed: Cell[int] = Cell(0)

    @property
    def trial(self) -> Trial:
        return self._trial

    @property
    def shelf(self) -> Shelf:
        return self._shelf

    def adapter(self, engine: str) -> Engine | None:
        return self._adapters.get(engine)

    def named(self, engine: str) -> bool:
        """Whether the node's settings name the program: then it is that one and no other."""
        return engine in self._commands

    # --- what is told --------------------------------------------------------------------------------------

    @property
    def installs(self) -> tuple[EngineInstall, ...]:
        """Every engine that is here or on its way, with what came of it; one entry for each version."""
        found: dict[Key, EngineInstall] = {}
        for install in (*self._here(), *self._coming.values()):
            key = (install.engine, install.version)
            if key not in found or found[key].state is not InstallState.INSTALLED:
                found[key] = install
        return tuple(found[key] for key in sorted(found))

    def _here(self) -> Iterator[EngineInstall]:
        for (engine, version), tried in sorted(self._tried.items()):
            if isinstance(tried.outcome, LlmgwError):
                yield EngineInstall(
                    engine=engine, version=version, state=InstallState.FAILED, detail=str(tried.outcome)
                )
                continue
            detail = " ".join(tried.outcome.command)
            if version:
                detail += f" ({tried.words})" if tried.words else ""
            elif engine in self._commands and (other := self._other(engine, tried.outcome.version)):
                detail += f" (this node's settings name it; {other} is wanted)"
            yield EngineInstall(engine=engine, version=version or tried.outcome.version, detail=detail)

    def _other(self, engine: str, version: str) -> str:
        wanted = self._preferred.get(engine, "")
        return "" if not wanted or same_version(wanted, version) else wanted

    def prefer(self, preferred: Mapping[str, str]) -> None:
        """The versions for shards that ask for none, as the plane has them."""
        self._preferred = dict(preferred)
        self._moved()

    @property
    def expected(self) -> tuple[Key, ...]:
        """Everything of which `coming` was told."""
        return tuple(self._coming)

    def still(self, engine: str) -> trio.Lock:
        """Held, nobody looks for this engine's programs or finds one meanwhile."""
        return self._trying[engine]

    def coming(self, key: Key, install: EngineInstall | None) -> None:
        """What is said of an installation that is under way or came to nothing; None: nothing any more."""
        if self._coming.get(key) == install:
            return
        if install is None:
            del self._coming[key]
        else:
            self._coming[key] = install
        self._moved()

    def _moved(self) -> None:
        self.changed.set(self.changed.value + 1)

    # --- finding -------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Find and try every engine; those that are not here are not mentioned."""
        for name in self._adapters:
            await self.refresh(name)

    async def found(self, engine: str, version: str = "", waiting: Callable[[str], None] | None = None) -> Found:
        """An engine's program, tried. While it is being installed it is waited for.

        `waiting` is told so in words, and "" when that is over. Raises NotFound where there is none,
        Failed where it does not work here.
        """
        if engine not in self._adapters:
            raise NotFound(f"no engine is called {engine!r}", remedy=f"known are {', '.join(sorted(self._adapters))}")
        said = ""
        while True:
            await self.refresh(engine)
            outcome = self.choice(engine, version)
            if isinstance(outcome, Found):
                if waiting is not None and said:
                    waiting("")  # from now on the start takes its own time
                return outcome
            coming = self._awaited(engine, version)
            if coming is None:
                # A fresh one: an exception that is raised again and again collects tracebacks.
                raise type(outcome)(outcome.what, remedy=outcome.remedy)
            seen, words = self.changed.version, f"waits for {engine} {coming.version}".rstrip() + " to be installed"
            if waiting is not None and words != said:
                waiting(words)
                said = words
            await self.changed.next(seen)

    def choice(self, engine: str, version: str) -> Found | LlmgwError:
        """What a shard gets that asks for this version, "" for any, of all that was tried."""
        tried = {known: one for (name, known), one in self._tried.items() if name == engine}
        outside = tried.pop(OUTSIDE, None)
        if outside is not None and engine in self._commands:
            return _as(outside.outcome, version)
        if version:
            return self._exactly(engine, version, tried, outside)
        newest = sorted(tried, key=_order, reverse=True)
        preferred = self._preferred.get(engine, "")
        order = [tried[preferred].outcome] if preferred in tried else []
        order += [outside.outcome] if outside is not None else []
        order += [tried[known].outcome for known in newest if known != preferred]
        working = (outcome for outcome in order if isinstance(outcome, Found))
        return next(working, order[0] if order else self._nothing(engine, ""))

    def _exactly(
        self, engine: str, version: str, tried: Mapping[str, Tried], outside: Tried | None
    ) -> Found | LlmgwError:
        if version in tried and isinstance(found := tried[version].outcome, Found):
            return found
        if outside is not None and isinstance(found := outside.outcome, Found) and same_version(version, found.version):
            return _as(found, version)
        if version in tried:
            return tried[version].outcome
        return self._nothing(engine, version)

    def _nothing(self, engine: str, version: str) -> LlmgwError:
        failed = next(
            (one for one in self._expected(engine, version) if one.state is not InstallState.INSTALLING), None
        )
        name = f"{engine} {version}".rstrip()
        if failed is not None:
            return Failed(f"{name}: {failed.state.value}: {failed.detail}", remedy="see `ctl engines`")
        have = ", ".join(
            install.version or "an unknown version" for install in self.installs if install.engine == engine
        )
        what = f"{name} is not installed on this node" + (f", which has {have}" if have else "")
        return NotFound(what, remedy="install it, or name its command in the node's settings")

    def _expected(self, engine: str, version: str) -> Iterator[EngineInstall]:
        for (name, asked), install in sorted(self._coming.items()):
            if name == engine and (not version or version in (asked, install.version)):
                yield install

    def _awaited(self, engine: str, version: str) -> EngineInstall | None:
        if engine in self._commands:
            return None
        return next((one for one in self._expected(engine, version) if one.state is InstallState.INSTALLING), None)

    # --- trying --------------------------------------------------------------------------------------------

    async def refresh(self, engine: str) -> None:
        """Look again where an engine's programs are, and try those that are new."""
        async with self._trying[engine]:
            outside = await trio.to_thread.run_sync(whereabouts, engine, self._commands)
            kept = await trio.to_thread.run_sync(self._shelf.all)
            own = {one.record.version: one for one in kept if one.record.engine == engine}
            for key in [key for key in self._tried if key[0] == engine and key[1] != OUTSIDE and key[1] not in own]:
                del self._tried[key]
                self._moved()
            if outside is None:
                if self._tried.pop((engine, OUTSIDE), None) is not None:
                    self._moved()
            else:
                await self._try((engine, OUTSIDE), outside, None)
            for version, one in own.items():
                await self._try((engine, version), one.place, one)

    async def _try(self, key: Key, place: Whereabouts, kept: Kept | None) -> None:
        engine = key[0]
        place = attrs.evolve(place, env={**place.env, **self._environments.get(engine, {})})
        whole = kept is None or await trio.to_thread.run_sync(lambda: kept.whole)
        mark = (*place.mark, whole)
        known = self._tried.get(key)
        if known is not None and known.counts(mark, trio.current_time()):
            return
        words = ""
        try:
            if kept is None:
                outcome: Found | LlmgwError = await self._outside(engine, place)
            else:
                words, outcome = await self._own(kept, place, whole)
        except LlmgwError as error:
            outcome = error
        except OSError as error:
            what = f"{engine}: it cannot be tried: {error.strerror or error}"
            outcome = Failed(
                what + (f" ({error.filename})" if error.filename else ""), remedy="check the disk and /tmp"
            )
        self._tried[key] = Tried(mark, place, outcome, trio.current_time(), words)
        self._moved()

    async def _outside(self, engine: str, place: Whereabouts) -> Found:
        if engine == "llamacpp":
            version = await self._trial.server(self._adapters[engine], place)
            return await _server(engine, place, version)
        if not await trio.to_thread.run_sync(place.runnable):
            raise NotFound(
                f"{engine}: {place.command[0]} is not a program that this agent may run",
                remedy="check the node's settings",
            )
        return Found(engine, place.command, place.version, place.env)

    async def _own(self, kept: Kept, place: Whereabouts, whole: bool) -> tuple[str, Found]:
        """One that the agent installed was tried before it counted; again only where program or processor changed."""
        record = kept.record
        if not whole:
            raise Failed(f"{record.engine} {record.version} in {kept.folder} is damaged", remedy="it is made anew")
        if record.engine == "llamacpp":
            if record.mark != place.fingerprint:
                await self._trial.server(self._adapters[record.engine], place)
            return record.tried, await _server(record.engine, place, record.version)
        return record.tried, Found(record.engine, place.command, record.version, place.env)


async def _server(engine: str, place: Whereabouts, version: str) -> Found:
    programs = await trio.to_thread.run_sync(lambda: place.programs)
    return Found(engine, place.command, version, place.env, programs)


def _as(outcome: Found | LlmgwError, version: str) -> Found | LlmgwError:
    """Under the version that was asked for, where that is what it is: "0.32.0+cpu" is 0.32.0."""
    if isinstance(outcome, Found) and version and same_version(version, outcome.version):
        return attrs.evolve(outcome, version=version)
    return outcome


def _order(version: str) -> tuple[tuple[int, str], ...]:
    """Versions by their numbers: 0.10 is newer than 0.9, and a release than its candidates."""
    parts = version.partition("+")[0].replace("-", ".").replace("_", ".").split(".")
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
