"""The crash matrix over real processes: a plane, two agents and llama.cpp, killed by SIGKILL at random moments.

Rounds: something is wanted (more or fewer replicas, of one node or over both, another profile, a node drained), and
while the fleet is about it one to three of its processes are killed, in any combination, and started again. Then the
fleet must come to rest: exactly the engines that are wanted, their pids those that ctl shows, the members of a replica
at one generation and answering, and nothing else on the machine. A watcher looks at all processes all the time, since
two of a shard may be there for a moment only.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import httpx
import trio

from llmgw.demo.processes import leftovers
from llmgw.node.engines.environment import GENERATION, SHARD, STATE
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import MODEL, Rig, rig

#: Seconds for the fleet to come to rest: an agent that often found no plane waits up to 30 s before it tries again.
REST_WITHIN = 150.0
#: Seconds for which everything must then stay as it is.
STAY = 2.0
LOOK_EVERY = 0.05
PROGRAMS = ("llama-server", "rpc-server", "ggml-rpc-server")

#: Over both nodes: llama-server leads on one, rpc-server follows on the other.
WIDE = """
[[models]]
name = "wide"
replicas = {replicas}
[models.profile]
engine = "llamacpp"
source = "{source}"
context = {context}
nodes = 2
args = ["-np", "1"]
ready_within = "40s"
resources = {{ memory = "64MiB" }}
"""


@attrs.frozen
class Running:
    """One engine that an agent of the rig started for a shard."""

    pid: int
    state: str
    shard: str
    generation: str
    program: str


def running(mark: str) -> Iterator[Running]:
    """Every engine of the rig that lives now, as the machine's own kernel shows it."""
    for pid in leftovers(mark):
        try:
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            pairs = [word.partition(b"=") for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        except OSError:
            continue
        env = {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
        # The shell that waits at the gate has the same environment and is no engine yet.
        name = Path(program).name
        if name in PROGRAMS and state not in "ZX" and SHARD in env:
            yield Running(pid, env[STATE], env[SHARD], env[GENERATION], name)


@attrs.define
class Tally:
    """What was done and what was found."""

    rounds: int = 0
    kills: Counter[str] = attrs.field(factory=Counter)
    looks: int = 0
    duplicates: set[str] = attrs.field(factory=set)
    lost: list[str] = attrs.field(factory=list)
    orphans: list[str] = attrs.field(factory=list)
    rests: list[float] = attrs.field(factory=list)
    wide: int = 0  # how often a replica over both nodes was there at the end of a round, and answered

    @property
    def found(self) -> int:
        return len(self.duplicates) + len(self.lost) + len(self.orphans)


@attrs.define
class Killer:
    """One rig and what is done to it."""

    fleet: Rig
    rng: random.Random
    tally: Tally
    replicas: int = 0
    wide: int = 0
    context: int = 2048
    source: Path = Path()

    async def watch(self) -> None:
        """Two of one attempt anywhere, or two of one shard on one node, are never there, not for a moment."""
        while True:
            engines = await trio.to_thread.run_sync(lambda: list(running(self.fleet.mark)))
            self.tally.looks += 1
            attempts = Counter((engine.shard, engine.generation) for engine in engines)
            places = Counter((engine.shard, Path(engine.state).name) for engine in engines)
            for key, count in (*attempts.items(), *places.items()):
                if count > 1:
                    pids = sorted(e.pid for e in engines if e.shard == key[0])
                    self.tally.duplicates.add(f"{key} runs {count} times: {pids}")
            await trio.sleep(LOOK_EVERY)

    async def want(self) -> str:
        """Something that makes the fleet start, stop, drain or replace; what it was, in words."""
        kind = self.rng.choice(("nothing", "nothing", "replicas", "wide", "wide", "profile", "drain", "none"))
        if kind == "drain":
            node = self.rng.choice(("n1", "n2"))
            await self.fleet.api.post(f"nodes/{node}/drain")
            return f"drain {node}"
        if kind == "none":
            self.replicas = self.wide = 0
        elif kind == "wide":
            self.wide = self.rng.choice((0, 1, 1, 2))
        elif kind == "replicas":
            self.replicas = self.rng.randint(1, 3)
        elif kind == "profile":
            self.context = 1024 if self.context == 2048 else 2048
        if kind != "nothing":
            await self.apply()
        return f"{kind}: {self.replicas} replicas, {self.wide} over both nodes, of context {self.context}"

    async def apply(self) -> None:
        text = MODEL.format(name="tiny", replicas=self.replicas, source=self.source)
        text = text.replace("context = 2048", f"context = {self.context}") if self.replicas else ""
        if self.wide:
            text += WIDE.format(replicas=self.wide, source=self.source, context=self.context)
        (await self.fleet.api.post("apply", content=text)).raise_for_status()

    async def kill(self, what: str) -> None:
        """SIGKILL to one process, and a while later another one in its place (an engine is the fleet's to replace)."""
        if what == "engine":
            engines = list(running(self.fleet.mark))
            if engines:
                victim = self.rng.choice(engines)
                self.tally.kills[victim.program] += 1
                os.kill(victim.pid, signal.SIGKILL)
            return
        self.tally.kills[what] += 1
        process = self.fleet.plane if what == "plane" else self.fleet.nodes[what]
        assert process is not None
        await self.fleet.kill(process)
        await trio.sleep(self.rng.choice((0.0, 0.3, 2.0, 7.0)))
        if what == "plane":
            await self.fleet.start_plane()
        else:
            await self.fleet.start_node(what)

    async def round(self) -> None:
        victims = self.rng.sample(("plane", "n1", "n2", "engine"), self.rng.choice((1, 1, 2, 2, 3)))
        words = f"{await self.want()}; killed: {', '.join(victims)}"
        await trio.sleep(self.rng.choice((0.0, 0.02, 0.1, 0.3, 1.0, 3.0)) * self.rng.random())
        async with trio.open_nursery() as nursery:
            for victim in victims:
                nursery.start_soon(self.kill, victim)
                await trio.sleep(self.rng.choice((0.0, 0.0, 0.1, 1.0)) * self.rng.random())
        for node in ("n1", "n2"):
            await self.fleet.api.post(f"nodes/{node}/undrain")
        self.tally.rounds += 1
        await self.rest(words)

    async def rest(self, words: str) -> None:
        began, since, before = time.monotonic(), None, None
        while True:
            now_is = await self.at_rest()
            now = time.monotonic()
            if isinstance(now_is, str):
                since = None
            elif since is None or now_is != before:
                since, before = now, now_is
            elif now - since >= STAY:
                self.tally.rests.append(since - began)
                if self.wide:
                    await self.answers(words)
                    self.tally.wide += 1
                return
            if now - began > REST_WITHIN:
                engines = list(running(self.fleet.mark))
                shown = {shard["pid"] for shard in (await self.fleet.shards()).values()}
                stray = [engine for engine in engines if engine.pid not in shown]
                self.tally.orphans += [f"{words}: {engine}" for engine in stray]
                if not stray:
                    self.tally.lost.append(f"{words}: {now_is}")
                raise AssertionError(f"after {words}: {now_is}; {engines}")
            await trio.sleep(0.1)

    async def answers(self, words: str) -> None:
        """Only a whole replica can answer."""
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await self.fleet.chat(client, model="wide", max_tokens=4)
        if answer.status_code != 200:
            self.tally.lost.append(f"{words}: a replica over both nodes answers {answer.status_code}: {answer.text}")

    async def at_rest(self) -> frozenset[int] | str:
        """The pids that run, when they are exactly those wanted and shown; why it is not at rest, else."""
        try:
            replicas = await self.fleet.replicas()
            nodes = [await self.fleet.node(name) for name in ("n1", "n2")]
        except httpx.HTTPError as error:
            return f"the plane does not answer: {error!r}"
        if not all(node["connected"] for node in nodes):
            return "a node is not connected"
        states = sorted((str(replica["model"]), str(replica["state"])) for replica in replicas)
        if states != [("tiny", "ready")] * self.replicas + [("wide", "ready")] * self.wide:
            return f"{self.replicas} replicas are wanted and {self.wide} over both nodes, and there are {states}"
        for replica in replicas:
            if len({shard["generation"] for shard in replica["shards"]}) > 1:
                return f"the members of {replica['id']} are of different generations"
        shown = {shard["pid"]: shard for replica in replicas for shard in replica["shards"]}
        engines = list(running(self.fleet.mark))
        for engine in engines:
            shard = shown.get(engine.pid)
            where = Path(engine.state).name
            if shard is None or (shard["node"], shard["id"]) != (where, engine.shard):
                return f"{engine} is not what ctl shows: {sorted(shown)}"
            if str(shard["generation"]) != engine.generation:
                return f"{engine} has another generation than ctl shows"
        if len(engines) != len(shown):
            return f"ctl shows {sorted(shown)}, and {sorted(engine.pid for engine in engines)} run"
        return frozenset(shown)


async def kill_often(kills: int, seed: int, tally: Tally, root: Path, until: float) -> None:
    """So many kills on one rig, as far as time allows; raises AssertionError when it does not come to rest."""
    async with rig(root, nodes=2) as fleet:
        source = write_tiny(root / "tiny.gguf")
        killer = Killer(fleet, random.Random(seed), tally, replicas=2, wide=1, source=source)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(killer.watch)
            await killer.apply()
            await killer.rest("the first start")
            said = time.monotonic()
            while tally.kills.total() < kills and not tally.duplicates and time.monotonic() < until:
                await killer.round()
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    print(f"  {tally.kills.total()} kills in {tally.rounds} rounds, found: {tally.found}", flush=True)
            nursery.cancel_scope.cancel()


def killed(kills: int, seed: int = 1, minutes: float = 120.0) -> int:
    """Run the real half and print its table; how much was found. No round begins after so many minutes."""
    print(f"over real processes (a plane, two agents, llama.cpp), {kills} times SIGKILL:", flush=True)
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="llmgw-crash-") as root:
        try:
            trio.run(kill_often, kills, seed, tally, Path(root), began + 60 * minutes)
        except* AssertionError as error:
            print(error.exceptions[0])
    each = ", ".join(f"{what} {count}" for what, count in sorted(tally.kills.items()))
    rests = sorted(tally.rests) or [0.0]
    print("  kills  rounds  with gangs   looks  duplicates  lost  orphans  median to rest  longest")
    print(
        f"  {tally.kills.total():5}  {tally.rounds:6}  {tally.wide:10}  {tally.looks:6}  {len(tally.duplicates):10}  "
        f"{len(tally.lost):4}  "
        f"{len(tally.orphans):7}  {rests[len(rests) // 2]:12.1f} s  {rests[-1]:5.1f} s"
    )
    print(f"  {time.monotonic() - began:.0f} s; killed: {each}")
    for found in (*sorted(tally.duplicates), *tally.lost, *tally.orphans):
        print(f"  {found}")
    return tally.found
