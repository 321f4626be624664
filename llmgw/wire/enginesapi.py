"""What the admin API answers about engines: which each node has, installs, cannot have, and should have.

Every key is always there; fields are only ever added, each with a default.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API


class EngineView(Struct, frozen=True, kw_only=True):
    """An engine at one version on a node.

    `state` is "installing", "installed", "failed", "unsupported", or "wanted" for one of which the node has not spoken
    yet. `wanted` says that the plane wants it there, `preferred` that shards get it which ask for no version.
    """

    engine: str = ""
    version: str = ""
    state: str = ""
    wanted: bool = False
    preferred: bool = False
    detail: str = ""


class NodeEnginesView(Struct, frozen=True, kw_only=True):
    """A node's engines; `installable` are those that it can install. `age` is how many seconds ago it was heard."""

    node: str = ""
    connected: bool = False
    age: float | None = None
    installable: tuple[str, ...] = ()
    engines: tuple[EngineView, ...] = ()


class EnginesReply(Struct, frozen=True, kw_only=True):
    """The nodes' engines. `wanted` is what the plane's settings say: version by engine, "" for any."""

    api: int = API
    wanted: dict[str, str] = {}
    nodes: tuple[NodeEnginesView, ...] = ()
