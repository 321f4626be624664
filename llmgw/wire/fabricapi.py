"""What the admin API answers about fabrics: the values that the plane encodes as JSON and `ctl` and the page read.

Every key is always there; fields are only ever added, each with a default. Ages are seconds counted on the plane;
`clock` is Unix seconds, only ever shown. GUIDs are written as sixteen hexadecimal digits.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API


class ManagerView(Struct, frozen=True, kw_only=True):
    """One subnet manager: `state` as it last answered, `silent_for` seconds when it does not."""

    guid: str = ""
    lid: int | None = None
    priority: int | None = None
    state: str = ""
    activity: int | None = None
    silent_for: float | None = None
    error: str = ""


class CountsView(Struct, frozen=True, kw_only=True):
    """What a map shows; `others` are aggregation nodes, routers and UFM appliances."""

    switches: int = 0
    hosts: int = 0
    adapters: int = 0
    links: int = 0
    others: int = 0


class FaultView(Struct, frozen=True, kw_only=True):
    """Something wrong with a cable for as long as it is seen. `ports` are GUID/PORT."""

    kind: str = ""
    grade: str = ""
    text: str = ""
    ports: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()


class ScanView(Struct, frozen=True, kw_only=True):
    """One scan that is kept; `error` is why it made no map."""

    id: int = 0
    clock: float = 0.0
    age: float = 0.0
    vantage: str = ""
    seconds: float = 0.0
    complete: bool = False
    holes: tuple[str, ...] = ()
    error: str = ""
    counts: CountsView = CountsView()
    changes: int = 0
    faults: int = 0
    bytes: int = 0
    forced: bool = False


class FabricRow(Struct, frozen=True, kw_only=True):
    """A fabric in a list. `scan` is the newest map, `error` why the newest scan made none."""

    name: str = ""
    labelled: bool = False
    master: str = ""
    managers: int = 0
    ports: int = 0
    nodes: int = 0
    troubles: tuple[str, ...] = ()
    scan: ScanView | None = None
    error: str = ""
    faults: dict[str, int] = {}  # by grade


class FabricsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    fabrics: tuple[FabricRow, ...] = ()


class SwitchView(Struct, frozen=True, kw_only=True):
    """A switch on the map. `tier` counts from the leaves (1); `rail` is the adapter that a leaf serves, if one."""

    guid: str = ""
    name: str = ""
    tier: int = 0
    rail: str = ""
    ports: int = 0
    adapters: int = 0
    links: int = 0  # to other switches
    faults: int = 0


class FabricReply(Struct, frozen=True, kw_only=True):
    """Everything about one fabric, its scans newest first."""

    api: int = API
    fabric: FabricRow = FabricRow()
    managers: tuple[ManagerView, ...] = ()
    vantages: tuple[str, ...] = ()
    faults: tuple[FaultView, ...] = ()
    switches: tuple[SwitchView, ...] = ()
    scans: tuple[ScanView, ...] = ()


class ScanReply(Struct, frozen=True, kw_only=True):
    """What a scan that was asked for came to. `raw` is the tool's own text, when it was wanted."""

    api: int = API
    fabric: str = ""
    scan: ScanView = ScanView()
    raw: str = ""


class ChangeView(Struct, frozen=True, kw_only=True):
    """One difference between two maps, and what it touches."""

    kind: str = ""
    text: str = ""
    ports: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    nodes: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    everyone: bool = False


class DiffReply(Struct, frozen=True, kw_only=True):
    """What changed between two scans; `blind` says what a partial map leaves open."""

    api: int = API
    fabric: str = ""
    older: ScanView = ScanView()
    newer: ScanView = ScanView()
    changes: tuple[ChangeView, ...] = ()
    blind: tuple[str, ...] = ()


class EndView(Struct, frozen=True, kw_only=True):
    """One end of a cable."""

    guid: str = ""
    port: int = 0
    name: str = ""
    kind: str = ""
    owner: str = ""  # node and device, by the node's own word
    counters: dict[str, int] = {}
    width: str = ""  # active, supported and enabled, where the port was asked
    speed: str = ""


class Moment(Struct, frozen=True, kw_only=True):
    """A cable in one kept scan: its pace, "" when it was not there, and both ends' error counters together."""

    scan: int = 0
    clock: float = 0.0
    complete: bool = False
    pace: str = ""
    peer: str = ""
    counters: dict[str, int] = {}


class LinkReply(Struct, frozen=True, kw_only=True):
    """A cable's numbers and its history, oldest first."""

    api: int = API
    fabric: str = ""
    pace: str = ""
    rate_gbps: float | None = None
    ends: tuple[EndView, ...] = ()
    faults: tuple[FaultView, ...] = ()
    history: tuple[Moment, ...] = ()


class RouteReply(Struct, frozen=True, kw_only=True):
    """The cables that traffic from one port to another takes, hop by hop; `broken` is where it ends instead."""

    api: int = API
    fabric: str = ""
    hops: tuple[str, ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
    broken: str = ""
    holes: tuple[str, ...] = ()
