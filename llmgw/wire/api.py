"""What the admin API answers: the values that the plane encodes as JSON and `llmgw ctl` and the page read.

Every key of these objects is always there; fields are only ever added, each with a default, so a client of
another version reads what it knows. Ages and durations are seconds and are counted on the plane; `*_clock`
is Unix seconds, only ever shown. Objects taken over from a node's own facts (interfaces, disks, imex,
managers, progress) leave out what is empty or unknown.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API, EventView, ProblemView
from llmgw.wire.modelapi import ModelView
from llmgw.wire.nodeapi import NodeRow
from llmgw.wire.replicaapi import ReplicaView

# --- the whole, and what happened -----------------------------------------------------------------------


class StatusReply(Struct, frozen=True, kw_only=True):
    """The fleet in a few numbers. `waiting` is what the plane puts off now and why, with the seconds left.

    `gateway` counts since the gateways started: "requests", of them "failed" (status from 500 on) and "left" (the
    client went away), "retries", "prompt_tokens", "completion_tokens"; and what is now: "held" and "in_flight".
    """

    api: int = API
    plane: str = ""
    version: str = ""
    uptime: float = 0.0
    clock: float = 0.0
    nodes: dict[str, int] = {}
    nodes_connected: int = 0
    nodes_cordoned: int = 0
    gpus: int = 0
    models: int = 0
    models_complete: int = 0
    replicas_wanted: int = 0
    replicas: dict[str, int] = {}
    strays: int = 0
    problems: dict[str, int] = {}
    waiting: str = ""
    waiting_for: float | None = None
    gateway: dict[str, float | int | str | None] = {}
    latest_event: int = 0


class EventsReply(Struct, frozen=True, kw_only=True):
    """Events, oldest first; `latest` goes into the next request's `after`."""

    api: int = API
    events: tuple[EventView, ...] = ()
    latest: int = 0


class DoneReply(Struct, frozen=True, kw_only=True):
    """It is done, and stored where it has to last. `text` says what, for a person."""

    api: int = API
    text: str = ""


class LogSourceView(Struct, frozen=True, kw_only=True):
    name: str = ""
    runs: tuple[str, ...] = ()
    bytes: int = 0


class LogsReplyView(Struct, frozen=True, kw_only=True):
    """Lines of one log, oldest first; `cursor` goes into the next request's `after`."""

    api: int = API
    node: str = ""
    source: str = ""
    run: str = ""
    lines: tuple[str, ...] = ()
    cursor: str = ""
    truncated: bool = False
    sources: tuple[LogSourceView, ...] = ()


class FindingView(Struct, frozen=True, kw_only=True):
    """One check of a node: "pass", "warn", "fail" or "skipped", its numbers and the command that fixes it."""

    check: str = ""
    outcome: str = ""
    text: str = ""
    subject: str = "node"
    numbers: dict[str, float | int | str] = {}
    remedy: str = ""
    seconds: float = 0.0


class DoctorView(Struct, frozen=True, kw_only=True):
    api: int = API
    node: str = ""
    findings: tuple[FindingView, ...] = ()
    seconds: float = 0.0


# --- identities ----------------------------------------------------------------------------------------


class TokenView(Struct, frozen=True, kw_only=True):
    """A join token, without its secret. `state`: "open", "used", "expired" or "revoked"; `node`: only that one."""

    id: str = ""
    state: str = ""
    node: str = ""
    note: str = ""
    replace: bool = False
    created_clock: float = 0.0
    expires_clock: float = 0.0
    expires_in: float = 0.0
    used_clock: float | None = None
    used_by: str = ""
    used_from: str = ""


class TokensReply(Struct, frozen=True, kw_only=True):
    api: int = API
    tokens: tuple[TokenView, ...] = ()


class TokenReply(Struct, frozen=True, kw_only=True):
    """A new join token. The secret is shown this once; the plane keeps only its hash. `plane` is where to join."""

    api: int = API
    id: str = ""
    token: str = ""
    expires_clock: float = 0.0
    expires_in: float = 0.0
    plane: str = ""


class CertView(Struct, frozen=True, kw_only=True):
    """A certificate that the plane gave out. `state`: "live", "renewal-due", "expired" or "revoked".

    `renews` is the serial it followed, `token` the id of the join token it was issued for.
    """

    name: str = ""
    role: str = ""
    serial: str = ""
    state: str = ""
    issued_clock: float = 0.0
    expires_clock: float = 0.0
    expires_in: float = 0.0
    renews: str = ""
    token: str = ""
    revoked_clock: float | None = None
    why: str = ""


class CertsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    certs: tuple[CertView, ...] = ()


class OverviewReply(Struct, frozen=True, kw_only=True):
    """What the page shows, in one answer and so of one moment."""

    api: int = API
    status: StatusReply = StatusReply()
    nodes: tuple[NodeRow, ...] = ()
    models: tuple[ModelView, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    problems: tuple[ProblemView, ...] = ()
    events: tuple[EventView, ...] = ()
