"""Where the survey looks, and what the operator told it about this node's adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs


@attrs.frozen
class View:
    """What a node's survey and `doctor` need to know beforehand.

    `root` is where `/sys`, `/proc`, `/dev`, `/etc` and `/run` are found: a container that has the host's
    mounted elsewhere names it here. `fabrics`, `roles` and `rails` say things of adapters that nothing on the
    wire tells (C10); their keys are device names ("mlx5_4"), ports ("mlx5_4/2"), netdevs, or shell patterns of these.
    """

    root: Path = Path("/")
    state: Path | None = None  # where the agent keeps its records
    weights: Path | None = None  # the cache of models
    period: float = 5.0  # seconds between two samples when nobody asks for one sooner
    fabrics: Mapping[str, str] = attrs.field(factory=dict)  # -> the fabric's label
    roles: Mapping[str, str] = attrs.field(factory=dict)  # -> "fabric", "storage" or "management"
    rails: Mapping[str, int] = attrs.field(factory=dict)  # -> the rail's number, from 0
    address: str = ""  # where engines on this node are reached; "": where its stream comes from
    imex: str = "nvidia-imex-ctl"
    plane: str = ""  # host:port, for doctor to try
    reserve: int = 0  # bytes of memory that are left to the machine

    def at(self, path: str) -> Path:
        """A path of the machine, below the root."""
        return self.root / path
