"""Sees to it that the engines which the plane wants are here, one installation at a time, and that unused ones go.

An installation belongs to the daemon: no stream's end cuts it short. It ends early when the plane wants it no more.
What failed is tried again, later and later, and at once when the plane says anew what it wants.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs
import structlog
import trio

from llmgw.backoff import Backoff
from llmgw.errors import LlmgwError
from llmgw.node.engines import Found
from llmgw.node.engines.installed import Installed, Key
from llmgw.node.installs import runlog
from llmgw.node.installs.causes import LASTING
from llmgw.node.installs.installer import InstallFailed, Means, install
from llmgw.node.installs.packages import KINDS, Site, Source, Unsupported, file_name, source
from llmgw.node.installs.running import Running, holder
from llmgw.node.installs.shelf import Kept
from llmgw.node.logs import Logs
from llmgw.process import give_back
from llmgw.wire.control import Provision
from llmgw.wire.facts import EngineInstall, EnginePackage, Grade, InstallState, Problem, ShardId

log = structlog.get_logger("llmgw.installs")

BACKOFF = Backoff(base=60.0, cap=3600.0)
#: Seconds between two looks at what is unused; and the least between two tries, however often a plane says its wish.
_TIDY_EVERY, _LEAST = 60.0, 10.0


@attrs.frozen
class _Failure:
    attempt: int
    at: float  # of the next try, on trio's clock
    failed_at: float
    error: InstallFailed


@attrs.define
class _Job:
    key: Key
    source: Source
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class Keeper:
    """Installs and removes engines. `run` must be running in the daemon's nursery; `order` is synchronous.

    `gpus` says whether this node has any, `packages` what its settings say of packages, `running` its shards. What
    nothing wants or runs is kept for `keep` seconds, to go back to.
    """

    def __init__(
        self,
        installed: Installed,
        means: Means,
        logs: Logs,
        *,
        allowed: bool = True,
        gpus: Callable[[], bool] = lambda: False,
        packages: Mapping[str, EnginePackage] | None = None,
        running: Callable[[], Iterable[Running]] = tuple,
        keep: float = 86400.0,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._installed, self._means, self._logs = installed, means, logs
        self._allowed, self._gpus = allowed, gpus
        self._own_packages = dict(packages or {})
        self._plane_packages: Mapping[str, EnginePackage] = {}
        self._running, self._keep, self._backoff = running, keep, backoff
        self._wanted: tuple[Key, ...] | None = None  # None: no plane has said it yet
        self._preferred: Mapping[str, str] = {}
        self._failures: dict[Key, _Failure] = {}
        self._job: _Job | None = None
        self._woken = trio.Event()

    # --- what is told --------------------------------------------------------------------------------------

    @property
    def site(self) -> Site:
        return Site(platform.machine(), self._gpus(), self._allowed)

    @property
    def installable(self) -> tuple[str, ...]:
        """The engines that this node can install, by name. Not one whose program its settings name."""
        site = self.site
        return tuple(
            sorted(engine for engine in KINDS if not self._installed.named(engine) and not self._why_not(engine, site))
        )

    @property
    def installs(self) -> tuple[EngineInstall, ...]:
        """What is here, what is on its way, and what cannot be here."""
        found = self._installed.installs
        there, site = {install.engine for install in found}, self.site
        missing = (
            EngineInstall(engine=engine, state=InstallState.UNSUPPORTED, detail=why)
            for engine in sorted(KINDS)
            if engine not in there and (why := self._why_not(engine, site))
        )
        return (*found, *missing)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wanted here and could not be installed, until it is or nobody wants it any more."""
        return tuple(
            Problem(
                subject="node",
                code=f"engine-not-installed:{file_name(*key)}",
                grade=Grade.WARN,
                text=f"{key[0]} {key[1]}".rstrip() + f" could not be installed: {failure.error.what}",
                remedy=failure.error.remedy,
            )
            for key, failure in sorted(self._failures.items())
        )

    def _why_not(self, engine: str, site: Site) -> str:
        found = self._source((engine, ""), site)
        return found.why if isinstance(found, Unsupported) else ""

    def _source(self, key: Key, site: Site | None = None) -> Source | Unsupported:
        engine, version = key
        return source(
            engine, version, site or self.site, self._plane_packages.get(engine), self._own_packages.get(engine)
        )

    # --- what is wanted ------------------------------------------------------------------------------------

    def order(self, order: Provision) -> None:
        """Have these engines, from now on; what failed is tried again."""
        # Versions first: where any will do, one of them may.
        wanted = sorted(((one.engine, one.version) for one in order.engines), key=lambda key: (not key[1], key))
        self._wanted, self._preferred = tuple(wanted), dict(order.preferred)
        self._plane_packages = dict(order.packages)
        self._installed.prefer(self._preferred)
        now = trio.current_time()
        for key, failure in self._failures.items():
            self._failures[key] = attrs.evolve(failure, at=min(failure.at, max(now, failure.failed_at + _LEAST)))
        job = self._job
        if job is not None and (job.key not in self._wanted or self._source(job.key) != job.source):
            job.scope.cancel()
        for key in [key for key in self._failures if key not in self._wanted]:
            del self._failures[key]
        self._forget_unwanted()
        self._woken.set()

    def _forget_unwanted(self) -> None:
        for key in self._installed.expected:
            if key not in (self._wanted or ()):
                self._installed.coming(key, None)

    # --- the daemon's task ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Install what is wanted and remove what is not, for ever."""
        shelf = self._means.shelf
        try:
            for name in await trio.to_thread.run_sync(shelf.sweep):
                log.info("an unfinished installation was removed", folder=name)
        except LlmgwError as error:
            log.warning("unfinished installations stay", why=str(error))
        while True:
            self._woken = trio.Event()
            key = await self._next()
            if key is not None:
                await self._one(key)
                continue
            await self.tidy()
            if not self._failures:
                await trio.to_thread.run_sync(shelf.forget_downloads)
            with trio.move_on_after(self._pause()):
                await self._woken.wait()

    def _pause(self) -> float:
        now = trio.current_time()
        return min([_TIDY_EVERY, *(max(0.0, failure.at - now) for failure in self._failures.values())])

    async def _next(self) -> Key | None:
        """The first of what is wanted and missing that is due; each gets its word."""
        first: Key | None = None
        for engine in dict.fromkeys(engine for engine, _ in self._wanted or () if self._installed.adapter(engine)):
            await self._installed.refresh(engine)
        for key in self._wanted or ():
            if self._installed.adapter(key[0]) is None:
                continue
            found = self._source(key)
            if self._installed.named(key[0]) or isinstance(self._installed.choice(*key), Found):
                self._failures.pop(key, None)
                self._installed.coming(key, None)
            elif isinstance(found, Unsupported):
                self._tell(key, InstallState.UNSUPPORTED, found.why)
            elif key not in self._failures or self._failures[key].at <= trio.current_time():
                if first is None:
                    first = key
                else:
                    self._tell(key, InstallState.INSTALLING, f"waits for {file_name(*first)} to be installed first")
        return first

    async def _one(self, key: Key) -> None:
        """Install one version, or note why not."""
        found = self._source(key)
        engine = self._installed.adapter(key[0])
        if isinstance(found, Unsupported) or engine is None:
            return
        job = self._job = _Job(key, found)
        name = ShardId(f"install:{file_name(key[0], found.version)}")
        began = trio.current_time()
        failure: InstallFailed | None = None
        self._tell(key, InstallState.INSTALLING, "begins")
        log.info("engine is being installed", engine=key[0], version=found.version, package=found.requirement)
        try:
            with job.scope:
                run, output = await trio.to_thread.run_sync(runlog.begin, self._logs, name)
                try:
                    try:
                        kept = await self._try(key, found, output)
                    except InstallFailed as error:
                        if error.kind != "no-disk" or not await self.tidy(keep=0.0):
                            raise
                        kept = await self._try(key, found, output)
                    log.info("engine installed", engine=key[0], version=kept.record.version, tried=kept.record.tried)
                except InstallFailed as error:
                    failure = error
                except LlmgwError as error:
                    failure = InstallFailed("failed", error.what, remedy=error.remedy)
                except Exception as error:
                    # A defect of ours costs this installation, and not the node its agent.
                    log.exception("installation failed", engine=key[0], version=found.version)
                    failure = InstallFailed("internal", f"a defect: {error!r}", remedy="see the agent's log")
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(runlog.end, self._logs, name, run, failure is not None)
        except OSError as error:
            failure = InstallFailed("disk", f"its log cannot be written: {error.strerror}", remedy="check the disk")
        finally:
            self._job = None
        give_back()
        if job.scope.cancelled_caught:
            log.info("engine is not installed: it is wanted no more", engine=key[0], version=found.version)
            self._installed.coming(key, None)
        elif failure is not None:
            await self._failed(key, failure, trio.current_time() - began)
        else:
            self._failures.pop(key, None)
            await self._installed.refresh(key[0])
            self._installed.coming(key, None)

    async def _try(self, key: Key, found: Source, output: Path) -> Kept:
        engine = self._installed.adapter(key[0])
        assert engine is not None
        return await install(
            engine, key[1], found, self._means, output, lambda words: self._tell(key, InstallState.INSTALLING, words)
        )

    def _tell(self, key: Key, state: InstallState, words: str) -> None:
        found = self._source(key)
        version = found.version if isinstance(found, Source) else key[1]
        self._installed.coming(key, EngineInstall(engine=key[0], version=version, state=state, detail=words))

    async def _failed(self, key: Key, error: InstallFailed, took: float) -> None:
        before = self._failures.get(key)
        attempt = 0 if before is None else before.attempt + 1
        # Half of the delay at least: a package index is nobody's to be hammered at.
        bound = (
            self._backoff.cap if error.kind in LASTING else min(self._backoff.cap, self._backoff.base * 2.0**attempt)
        )
        now = trio.current_time()
        self._failures[key] = _Failure(attempt, now + bound * (0.5 + random.random() / 2), now, error)
        self._tell(key, InstallState.FAILED, str(error))
        if error.kind not in ("no-network", "too-slow"):
            # What was downloaded may be what is wrong.
            await trio.to_thread.run_sync(self._means.shelf.forget_downloads)
        log.warning("engine could not be installed", engine=key[0], version=key[1], why=str(error), seconds=round(took))

    # --- what goes -----------------------------------------------------------------------------------------

    async def tidy(self, keep: float | None = None) -> tuple[str, ...]:
        """Remove installed engines that nothing has wanted or run for so long; their names.

        Never before a plane has said what it wants.
        """
        if self._wanted is None:
            return ()
        shelf, gone = self._means.shelf, list[str]()
        for kept in await trio.to_thread.run_sync(shelf.all):
            engine, version = kept.record.engine, kept.record.version
            if self._installed.adapter(engine) is None:
                continue
            async with self._installed.still(engine):
                # Asked under the lock: a shard that comes from now on finds it gone, or one that came holds it.
                shards = tuple(self._running())
                if await trio.to_thread.run_sync(shelf.kept, engine, version) is None:
                    continue
                who = await trio.to_thread.run_sync(holder, kept, shards)
                if who or self._needed(kept):
                    await trio.to_thread.run_sync(shelf.used, kept)
                    continue
                idle = time.time() - kept.record.used
                if idle < (self._keep if keep is None else keep):
                    continue
                stays = await trio.to_thread.run_sync(shelf.remove, kept)
            if stays:
                log.warning("an engine that nothing needs stays", engine=engine, version=version, why=stays)
            else:
                gone.append(file_name(engine, version))
                log.info("an engine that nothing needs was removed", engine=engine, version=version)
                await self._installed.refresh(engine)
        return tuple(gone)

    def _needed(self, kept: Kept) -> bool:
        engine, version = kept.record.engine, kept.record.version
        wanted = self._wanted or ()
        if (engine, version) in wanted or self._preferred.get(engine) == version:
            return True
        # The one that shards get which do not care.
        chosen = self._installed.choice(engine, "") if (engine, "") in wanted else None
        return isinstance(chosen, Found) and chosen.command[:1] == kept.place.command
