"""Models, their past, and why they are not served whole, as the admin API answers them: see `wire.api`."""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API
from llmgw.wire.replicaapi import ReplicaView


class ModelView(Struct, frozen=True, kw_only=True):
    """A model: how many replicas are wanted now, placed and ready, and what keeps the rest away.

    `elsewhere` are the addresses of engines that serve it too and are not the plane's to run (`[[endpoints]]`).
    `updated` replicas have the wanted revision of its profile; `rollout` says in words how a change goes on, `paused`
    why it does not. `replicas` is how many were asked for: none of them are wanted while it is `unloaded`, for want of
    requests for `idle` seconds; `idle_in` is how long until then, if no request comes. `requests` are those that ended
    since the gateways started, `failed` with a status from 500 on; `held` wait now for it to be ready.
    """

    name: str = ""
    engine: str = ""
    source: str = ""
    revision: int = 0
    wanted: int = 0
    placed: int = 0
    ready: int = 0
    nodes_each: int = 1
    gpus_each: int = 0
    reason: str = ""
    smallest_change: str = ""
    elsewhere: tuple[str, ...] = ()
    updated: int = 0
    rollout: str = ""
    paused: str = ""
    surge: int = 1
    replicas: int = 0
    idle: float = 0.0
    idle_in: float | None = None
    unloaded: bool = False
    revisions: int = 1
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    held: int = 0


class ModelsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    models: tuple[ModelView, ...] = ()


class RevisionView(Struct, frozen=True, kw_only=True):
    """A profile that a model has or had. `changes` against the one before, in words; `replicas` that run it now.

    `clock` is until when it was wanted; 0 for the present one.
    """

    revision: int = 0
    current: bool = False
    clock: float = 0.0
    engine: str = ""
    source: str = ""
    changes: tuple[str, ...] = ()
    replicas: int = 0


class HistoryReply(Struct, frozen=True, kw_only=True):
    """A model's profiles in the order in which they were wanted: what a roll back can go to, and what differs."""

    api: int = API
    model: str = ""
    revision: int = 0
    revisions: tuple[RevisionView, ...] = ()


class ReasonView(Struct, frozen=True, kw_only=True):
    """Why one node does not take a shard: the check, the value there, the value needed, the fact's age."""

    node: str = ""
    check: str = ""
    value: str = ""
    needed: str = ""
    age: float | None = None
    text: str = ""


class StandingView(Struct, frozen=True, kw_only=True):
    """One shard of a model: what it does, and in `text` why it is there and what is in its way."""

    shard: str = ""
    node: str = ""
    generation: int = 0
    state: str = ""
    text: str = ""


class ChangeView(Struct, frozen=True, kw_only=True):
    """Something an operator can do, in words. `effort` compares: 1 is a command, 50 a machine more."""

    kind: str = ""
    effort: int = 0
    text: str = ""


class WhyReply(Struct, frozen=True, kw_only=True):
    """Why a model is not fully placed or not ready: a sentence, each shard, and per node what keeps it away.

    The node that is nearest to fitting comes first. `waiting` is what holds the whole plane back, if anything.
    `changes` is `smallest_change` one by one, where it was proved to be enough.
    """

    api: int = API
    model: str = ""
    wanted: int = 0
    placed: int = 0
    ready: int = 0
    waiting: str = ""
    reasons: tuple[ReasonView, ...] = ()
    smallest_change: str = ""
    replicas: tuple[ReplicaView, ...] = ()
    text: str = ""
    standings: tuple[StandingView, ...] = ()
    changes: tuple[ChangeView, ...] = ()


class ApplyReply(Struct, frozen=True, kw_only=True):
    """What an apply changes, or with `dry_run` would change: model names. `words` of those that change: how."""

    api: int = API
    dry_run: bool = False
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    words: dict[str, str] = {}
