"""The agent as a process: what it is made of, and whose nursery each part lives in.

Only here are the parts wired together. Survey, shards and installs live in the daemon's nursery; all that belongs to
one stream lives in that stream's. Ending the agent ends neither engines nor what they serve (C2).
"""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import AsyncIterator
from functools import partial

import attrs
import structlog
import trio
from msgspec import structs

from llmgw import __version__, log
from llmgw.errors import BadInput
from llmgw.files import alone, make_directory
from llmgw.node.answers import Answers, Say, features
from llmgw.node.doctor.run import doctor
from llmgw.node.engines.environment import PROBE, STATE
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.llamacpp import LlamaCpp
from llmgw.node.engines.sglang import Sglang
from llmgw.node.engines.vllm import Vllm
from llmgw.node.epoch import EPOCH, Epoch
from llmgw.node.fabric import Scanner
from llmgw.node.identity import Identity, renewals
from llmgw.node.installs.installer import Means as Installing
from llmgw.node.installs.keeper import Keeper
from llmgw.node.installs.packages import Where
from llmgw.node.installs.shelf import Shelf
from llmgw.node.link import keep
from llmgw.node.logs import Logs
from llmgw.node.managers import ManagerWatch
from llmgw.node.perftest import Perftest
from llmgw.node.settings import NodeSettings
from llmgw.node.shards import Shards
from llmgw.node.stream import Beats, Duties, PlaneStream
from llmgw.node.survey import Survey
from llmgw.node.weights.cache import Cache
from llmgw.node.weights.peers import Peers
from llmgw.node.weights.revoked import Revocations
from llmgw.node.weights.sharing import Orders, Sharing
from llmgw.node.weights.whence import Whence
from llmgw.process import give_back
from llmgw.wire.agent import GANGS, REFRESH, Heartbeat, Register
from llmgw.wire.control import (
    DoctorReply,
    DoctorRequest,
    DrainShard,
    FetchWeights,
    Goodbye,
    LogsReply,
    LogsRequest,
    Provision,
    Revoked,
    StartShard,
    StopShard,
)
from llmgw.wire.facts import EngineInstall, NodeId, PortManagers, Problem, Weights
from llmgw.wire.stream import Frames

say = structlog.get_logger("llmgw.node")

#: Seconds between two looks at which engines are installed: somebody may install one by hand.
INSTALLS_EVERY = 60.0
#: Seconds that a Register waits for the first look at engines and weights. An engine that hangs when it is tried, or a
#: disk, must not cost the node its place: what comes of it follows in a heartbeat.
LOOK_WITHIN = 5.0


async def run(settings: NodeSettings) -> None:
    """Run the agent until SIGTERM or SIGINT. Raises LlmgwError when it cannot start."""
    if not settings.addresses:
        raise BadInput("this node knows no plane", remedy="join one: `llmgw-node join wss://PLANE:7443 --token TOKEN`")
    make_directory(settings.directory)
    # Two agents would start two engines for each shard, and each would take the other's for its own.
    with alone(settings.directory / "lock", "another agent"):
        _mark_tools(settings)
        await _run(assemble(settings))


def _mark_tools(settings: NodeSettings) -> None:
    """Whatever this process starts from now on and is no engine carries a mark (SD03).

    An agent that is killed cannot end its bandwidth tests and probes; the next one finds them by it.
    """
    os.environ[STATE], os.environ[PROBE] = str(settings.directory.absolute()), "1"


async def _run(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.survey.run)
        nursery.start_soon(node.weights.run)
        nursery.start_soon(node.sharing.run)
        nursery.start_soon(node.shards.run)
        nursery.start_soon(node.watch_installs)
        nursery.start_soon(node.keep_installs)
        nursery.start_soon(node.managers.run)
        nursery.start_soon(node.perftest.run)
        nursery.start_soon(node.keep_stream)
        say.info("agent runs", node=node.name, version=__version__, planes=list(node.settings.planes))
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(aiter(signals))
        say.info("agent stops; its engines go on")
        nursery.cancel_scope.cancel()


@attrs.define
class Node:
    """An agent's parts, assembled and not yet running."""

    settings: NodeSettings
    name: NodeId
    identity: Identity | None
    survey: Survey
    shards: Shards
    installed: Installed
    keeper: Keeper
    logs: Logs
    epoch: Epoch
    perftest: Perftest
    managers: ManagerWatch
    weights: Cache
    sharing: Sharing
    revoked: Revocations
    answers: Answers
    newest: list[Register]
    looked: trio.Event = attrs.field(factory=trio.Event)

    # --- what a stream borrows -------------------------------------------------------------------------

    def duties(self) -> Duties:
        return Duties(
            register=self.register,
            beats=self.beats,
            hardware=self._hardware,
            changes=self.shards.changes.subscribe,
            command=self.command,
            obey=self.epoch.obey,
            renewals=partial(renewals, self.identity) if self.identity is not None else None,
            answers=self.answers,
            news=self._news,
        )

    async def register(self) -> Register:
        """The node's whole truth. Never before what an earlier agent left running is known again (A7)."""
        await self._known()
        seen = await self.survey.register()
        self.newest[0] = whole = structs.replace(
            seen,
            node=self.name,
            version=__version__,
            features=tuple(sorted((*features(self.answers), GANGS, REFRESH))),
            problems=(*seen.problems, *self.problems),
            installable=self.keeper.installable,
            installs=self.keeper.installs,
            managers=self.managers.latest.value,
            weights=self.weights.weights,
            shards=self.shards.statuses(),
            labels=dict(self.settings.labels),
            epoch=self.epoch.value,
            share=self.sharing.address,
            engine_ports=(self.settings.engine_ports.first, self.settings.engine_ports.last),
        )
        return whole

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong beside hardware and host: with shards, and with engines that should be here."""
        return (*self.shards.problems, *self.keeper.problems)

    def beats(self, told: Register) -> Beats:
        return _Whole(self, self.survey.beats(told), told)

    def _hardware(self) -> AsyncIterator[int]:
        return self.survey.changed.values()

    def _news(self) -> AsyncIterator[int]:
        return self.survey.news.values()

    def command(self, order: StartShard | StopShard | DrainShard | Provision | FetchWeights | Revoked) -> None:
        match order:
            case StartShard():
                self.weights.told(order.spec.source, _whence(order))
                self.shards.start(order)
            case StopShard():
                self.shards.stop(order)
            case DrainShard():
                self.shards.drain(order)
            case Provision():
                self.keeper.order(order)
            case FetchWeights():
                self.weights.told(order.source, _whence(order))
                self.weights.ahead(order)
            case Revoked():
                self.revoked.take(order.serials)

    # --- the daemon's tasks ----------------------------------------------------------------------------

    async def watch_installs(self) -> None:
        """Find the engines, and look again now and then."""
        while True:
            await self.installed.look()
            self.looked.set()
            give_back()
            await trio.sleep(INSTALLS_EVERY)

    async def keep_installs(self) -> None:
        """Install and remove engines, once what an earlier agent left of that has ended."""
        await self.shards.adopted.wait()
        await self.keeper.run()

    async def _known(self) -> None:
        await self.shards.adopted.wait()
        with trio.move_on_after(LOOK_WITHIN):
            await self.looked.wait()
            await self.weights.looked.wait()

    async def keep_stream(self) -> None:
        # Before the first dial: a plane gives a new stream 10 s for its Register (A3).
        await self._known()
        await keep(self.settings.addresses, self._context, self._carry)

    def _context(self) -> ssl.SSLContext | None:
        self.epoch.reload()
        return self.identity.context() if self.identity is not None else None

    async def _carry(self, frames: Frames) -> Goodbye:
        return await PlaneStream(frames, self.duties()).run()


def _whence(order: StartShard | FetchWeights) -> Whence:
    return Whence.told(order.weights_from, order.weights_soon, order.weights_revision)


class _Whole:
    """A stream's heartbeats: the survey's, with engines, weights, managers and our own problems when they changed."""

    def __init__(self, node: Node, beats: Beats, told: Register) -> None:
        self._node = node
        self._beats = beats
        self._installs: tuple[EngineInstall, ...] = told.installs
        self._installable = told.installable
        self._managers: tuple[PortManagers, ...] = told.managers
        self._weights: tuple[Weights, ...] = told.weights
        self._share = told.share
        self._problems = node.problems
        self._survey_problems = tuple(problem for problem in told.problems if problem not in self._problems)

    async def next(self) -> Heartbeat:
        beat = await self._beats.next()
        problems = self._node.problems
        if beat.problems is not None:
            self._survey_problems = beat.problems
        if beat.problems is not None or problems != self._problems:
            self._problems = problems
            beat = structs.replace(beat, problems=(*self._survey_problems, *problems))
        if (installs := self._node.keeper.installs) != self._installs:
            self._installs = installs
            beat = structs.replace(beat, installs=installs)
        if (installable := self._node.keeper.installable) != self._installable:
            self._installable = installable
            beat = structs.replace(beat, installable=installable)
        if self._node.managers.latest.value != self._managers:
            self._managers = self._node.managers.latest.value
            beat = structs.replace(beat, managers=self._managers)
        if (weights := self._node.weights.weights) != self._weights:
            self._weights = weights
            beat = structs.replace(beat, weights=weights)
        if (share := self._node.sharing.address) != self._share:
            self._share = share
            beat = structs.replace(beat, share=share)
        return beat


def assemble(settings: NodeSettings) -> Node:
    """The parts of an agent. Raises LlmgwError for an identity that cannot be used."""
    identity = None if settings.insecure else Identity.load(settings.directory)
    directory = settings.directory
    logs = Logs(directory / "logs", log.ring, most_bytes=settings.logs.bytes, keep=settings.logs.keep)
    commands = {name: engine.command for name, engine in settings.engines.items()}
    environments = {name: engine.env for name, engine in settings.engines.items()}
    shelf = Shelf(settings.path(settings.installs.directory))
    installed = Installed(
        [LlamaCpp(), Vllm(), Sglang()], commands=commands, environments=environments, state=directory, shelf=shelf
    )
    newest = [Register(node=NodeId(""), version="")]
    survey = Survey(settings.view, lambda: shards.pids())

    def facts() -> Register:
        """What was told last, with the hardware as it is now: a shard is checked against this before it starts."""
        now = survey.snapshot_of_facts()
        return structs.replace(newest[0], host=now.host, gpu_driver=now.driver, gpus=now.gpus, ports=now.ports)

    weights = Cache(
        settings.path(settings.weights),
        in_use=lambda: shards.sources(),
        bytes_per_second=settings.weights_bytes_per_second or None,
        reserve=settings.weights_reserve,
        peers=Peers(settings.weights_peers, directory) if not settings.insecure else None,
    )
    shards = Shards(
        directory,
        installed=installed,
        logs=logs,
        facts=facts,
        ports=range(settings.engine_ports.first, settings.engine_ports.last + 1),
        listen=settings.address or "0.0.0.0",
        holders=survey.holders,
        fetch=weights.fetch,
    )
    keeper = Keeper(
        installed,
        _installing(settings, installed),
        logs,
        allowed=settings.install,
        gpus=lambda: bool(survey.snapshot_of_facts().gpus),
        packages={name: package.told for name, package in settings.packages.items()},
        running=shards.running,
        keep=settings.installs.keep,
    )
    perftest = Perftest(
        install=settings.install,
        busy=lambda: tuple(status.shard for status in shards.statuses() if status.state.alive),
        address=settings.address,
        root=settings.root,
    )

    scanner = Scanner(lambda: newest[0].ports, root=settings.root)
    managers = ManagerWatch(scanner)

    async def answer_logs(request: LogsRequest, _say: Say) -> LogsReply:
        return await logs.answer(request)

    async def answer_doctor(request: DoctorRequest, _say: Say) -> DoctorReply:
        try:
            return await doctor(settings, request.only)
        finally:
            give_back()

    return Node(
        settings=settings,
        name=identity.node if identity is not None else settings.name(),
        identity=identity,
        survey=survey,
        shards=shards,
        installed=installed,
        keeper=keeper,
        logs=logs,
        epoch=Epoch.load(directory / EPOCH),
        perftest=perftest,
        managers=managers,
        weights=weights,
        sharing=Sharing(directory, Orders.of(settings) if settings.share and not settings.insecure else None),
        revoked=Revocations(directory),
        answers={
            LogsRequest: answer_logs,
            DoctorRequest: answer_doctor,
            **perftest.answers,
            **scanner.answers,
            **weights.answers,
        },
        newest=newest,
    )


def _installing(settings: NodeSettings, installed: Installed) -> Installing:
    chosen = settings.installs
    return Installing(
        state=settings.directory.absolute(),
        shelf=installed.shelf,
        trial=installed.trial,
        where=Where(chosen.index, chosen.extra_index, chosen.find_links, chosen.offline, chosen.args),
        installer=chosen.installer,
        python=chosen.python,
        within=chosen.within,
        try_within=chosen.try_within,
        reserve=chosen.reserve,
    )
