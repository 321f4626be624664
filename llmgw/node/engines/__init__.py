"""Engines: what llmgw knows of each program that serves a model, behind one seam.

An adapter decides and does no I/O. It says why a shard cannot run here before minutes are spent on loading it,
which command runs it, how its health is asked, and what its dying words mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from llmgw.node.engines.causes import Cause, Ended
from llmgw.node.engines.contents import Contents
from llmgw.wire.agent import Register
from llmgw.wire.facts import ShardSpec


@attrs.frozen
class Objection:
    """Why a shard cannot run on this node; `code` is one of the words of `ShardStatus.cause_code`."""

    code: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


@attrs.frozen
class Found:
    """An engine's program on this node: how to call it, its version, and what its environment needs.

    `programs` are others that came with it, by name: llama.cpp's "rpc-server".
    """

    engine: str
    command: tuple[str, ...]
    version: str = ""
    env: Mapping[str, str] = attrs.field(factory=dict)
    programs: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Seat:
    """What the node decided for one run: the program, where to listen, the ports by purpose, the model's files.

    `address` is where other nodes reach this one. `model` is what the engine is told to load: a path, or a hub's
    name for it, and then `revision` may say which.
    """

    found: Found
    listen: str
    ports: Mapping[str, int]
    model: str
    revision: str = ""
    address: str = "127.0.0.1"
    cpu_threads: int = 1
    gpu_memory_bytes: int | None = None  # of the smallest GPU given to the shard
    layers: int | None = None  # of the model, where its files say it


class Rehearsal(Protocol):
    """A short run before the real one, in its environment: what it prints decides whether the start makes sense."""

    @property
    def argv(self) -> tuple[str, ...]: ...

    @property
    def within(self) -> float:
        """The seconds it may take; past them it is judged by what it has printed."""
        ...

    def objection(self, lines: Sequence[str]) -> Objection | None:
        """What its output says against the start. Pure."""
        ...


@attrs.frozen
class Command:
    """What is executed. `env` is the engine's own part; `environment.engine_environment` makes the whole."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(factory=dict)
    cwd: str = "/"
    rehearsal: Rehearsal | None = None


@attrs.frozen
class Asking:
    """How this engine's health is asked over HTTP.

    `timeout` in seconds is above what the engine itself may take to answer under load. After `dead_after`
    answers of "unhealthy" in a row the engine is taken for dead: its own word for that differs in weight.
    `token` says that readiness is proved by one generated token. `running`, `waiting` and `made` are the names of
    Prometheus series: requests in it, and whatever moves as long as it works on them.
    """

    health: str = "/health"
    models: str = "/v1/models"
    completions: str = "/v1/completions"
    metrics: str = "/metrics"
    timeout: float = 5.0
    dead_after: int = 6
    token: bool = True
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@attrs.frozen
class Listens:
    """A member without HTTP is ready once it listens on the port of this purpose, which is seen and not tried.

    llama.cpp's RPC server takes one client at a time and dies when one leaves before its turn.
    """

    port: str


class Engine(Protocol):
    """One kind of engine."""

    @property
    def name(self) -> str: ...

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        """The purposes of the ports that a shard needs, "http" first; a name with "+" takes a whole block."""
        ...

    def weights(self, spec: ShardSpec) -> bool:
        """Whether this member reads the model's files. llama.cpp's followers are sent their part by the leader."""
        ...

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        """Everything that keeps this shard from running here. Pure. `contents` is None where there are no files yet."""
        ...

    def command(self, spec: ShardSpec, seat: Seat) -> Command | Objection:
        """What to execute. Pure: the same spec and seat make the same command. An objection where the program that
        this member needs did not come with the engine.
        """
        ...

    def asking(self, spec: ShardSpec) -> Asking | Listens | None:
        """How to ask for health; None for a member that has no HTTP of its own, which is well while it lives."""
        ...

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        """The probable cause of an end, from the output and the way it ended."""
        ...


def source_of(source: str) -> tuple[Path | None, str, str]:
    """A source as (path, name in a hub, revision): exactly one of the first two says something.

    `hf://org/model@revision`, `file:///path` and plain absolute paths. Anything else has neither.
    """
    if source.startswith("hf://"):
        name, _, revision = source.removeprefix("hf://").strip("/").partition("@")
        return None, name, revision
    path = source.removeprefix("file://")
    return (Path(path), "", "") if path.startswith("/") else (None, "", "")
