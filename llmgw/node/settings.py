"""node.toml: everything that an operator may decide about a node, with its default."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

from llmgw import config, pki
from llmgw.config import Listen, LogSettings, PackageSettings
from llmgw.errors import BadInput
from llmgw.labels import check_label
from llmgw.node.installs.packages import KINDS
from llmgw.node.link import Address, address
from llmgw.node.view import View
from llmgw.toml import Bytes, Seconds
from llmgw.wire.facts import NodeId

PREFIX = "LLMGW_NODE"
DIRECTORY = Path("/var/lib/llmgw-node")
ETC = Path("/etc/llmgw/node.toml")
NAMED = "give it a name by --name, or by `node` in node.toml"


@attrs.frozen
class PortRange:
    """TCP ports, both ends included: "20000-29999"."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Raises ValueError."""
        first, _, last = (part.strip() for part in text.partition("-"))
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise ValueError(f"{text!r} is not a range of ports: write FIRST-LAST, such as 20000-29999")
        found = cls(int(first), int(last))
        if not 1024 <= found.first <= found.last <= 65535:
            raise ValueError(f"{text!r} is not a range of ports: from 1024 to 65535, the lower one first")
        return found

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@attrs.frozen
class EngineSettings:
    """[engines.NAME]: the program that is this engine here. `env` is added to its environment."""

    command: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))
    env: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class InstallSettings:
    """[installs]: how engines are installed, when `install` lets the agent do it."""

    #: One virtual environment for each engine and version lies in here.
    directory: Path = Path("engines")
    #: "auto": uv where there is one, else pip.
    installer: Literal["auto", "uv", "pip"] = "auto"
    #: The Python that virtual environments are made with; "": the agent's own.
    python: str = ""
    #: Instead of PyPI, and besides it. They may hold a password.
    index: str = attrs.field(default="", repr=False)
    extra_index: tuple[str, ...] = attrs.field(default=(), repr=False)
    #: Folders of wheels, or pages that link to some.
    find_links: tuple[str, ...] = ()
    #: Only from `find_links`: no index is asked.
    offline: bool = False
    #: More words for `pip install` or `uv pip install`.
    args: tuple[str, ...] = ()
    within: Seconds = attrs.field(default=3600.0, validator=attrs.validators.ge(1.0))
    #: For the trial of what was installed: importing and loading.
    try_within: Seconds = attrs.field(default=600.0, validator=attrs.validators.ge(1.0))
    #: Of the disk this is never filled.
    reserve: Bytes = attrs.field(default=1 << 30, validator=attrs.validators.ge(0))
    #: A version that nothing wants or runs is kept for so long, to go back to.
    keep: Seconds = attrs.field(default=86400.0, validator=attrs.validators.ge(0.0))

    def __attrs_post_init__(self) -> None:
        if self.offline and not self.find_links:
            raise ValueError("offline without find_links: name the folder of wheels in find_links")


@attrs.frozen
class RunLogs:
    """[logs]: the output of engines that is kept, per shard: so many runs, each up to so many bytes."""

    keep: int = attrs.field(default=5, validator=attrs.validators.ge(1))
    bytes: Bytes = attrs.field(default=16 << 20, validator=attrs.validators.ge(64 << 10))


def _all_labels(settings: object, field: object, labels: Mapping[str, str]) -> None:
    for name, value in labels.items():
        check_label(name, value)


@attrs.frozen
class NodeSettings:
    """node.toml. Paths are relative to `directory`, and that to the file; by default it is where the file is."""

    directory: Path = Path()
    #: This node's name; "": the one its certificate has, else the host's.
    node: str = ""
    planes: tuple[str, ...] = ()
    #: Where engines on this node are reached by gateways; "": where its stream comes from.
    address: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict, validator=_all_labels)

    weights: Path = Path("weights")
    #: All fetches of weights together take no more of the network, in bytes per second; 0: as much as there is.
    weights_bytes_per_second: Bytes = attrs.field(default=0, validator=attrs.validators.ge(0))
    #: Keep a process beside the agent that gives this node's weights to other nodes, as `llmgw-node share` does.
    share: bool = False
    #: Nodes that share theirs, asked beside those that the plane names: HOST:PORT.
    weights_peers: tuple[Listen, ...] = ()
    #: Where this node gives its own, with `share = true` or by `llmgw-node share`.
    weights_listen: Listen = Listen("0.0.0.0", 7445)
    #: Of the disk of the weights this is never filled.
    weights_reserve: Bytes = attrs.field(default=1 << 30, validator=attrs.validators.ge(0))
    engine_ports: PortRange = PortRange(20000, 29999)
    engines: Mapping[str, EngineSettings] = attrs.field(factory=dict)
    #: May the agent install engines and tools (perftest) by itself?
    install: bool = True
    installs: InstallSettings = InstallSettings()
    #: Where this node gets an engine from, over what the plane says.
    packages: Mapping[str, PackageSettings] = attrs.field(factory=dict)
    #: Memory that is left to the machine and never given to engines.
    memory_reserve: Bytes = 1 << 30

    #: What nothing on the wire tells of adapters (C10), by device, port ("mlx5_4/2"), netdev or a pattern of these.
    fabrics: Mapping[str, str] = attrs.field(factory=dict)
    roles: Mapping[str, Literal["fabric", "storage", "management"]] = attrs.field(factory=dict)
    rails: Mapping[str, int] = attrs.field(factory=dict)

    #: Where the machine's /sys, /proc and /dev are found: a container names the host's here.
    root: Path = Path("/")
    survey_every: Seconds = attrs.field(default=5.0, validator=attrs.validators.ge(0.2))
    imex: str = "nvidia-imex-ctl"

    logs: RunLogs = RunLogs()
    log: LogSettings = LogSettings()
    insecure: bool = False

    def __attrs_post_init__(self) -> None:
        if self.node:
            pki.check_name(self.node)
        for plane in self.addresses:
            if not plane.secure and not self.insecure:
                raise ValueError(f"{plane} is without TLS: use wss://, or set insecure = true for a test on loopback")
        if self.insecure:
            config.refuse_insecure(True, {f"the plane {plane}": plane.host for plane in self.addresses})
        if unknown := [engine for engine in self.packages if engine not in KINDS]:
            raise ValueError(f"there is no engine {unknown[0]!r} to install: there are {', '.join(sorted(KINDS))}")
        if bad := [device for device, rail in self.rails.items() if not 0 <= rail < 256]:
            raise ValueError(f"the rail of {bad[0]} is {self.rails[bad[0]]}; rails are numbered from 0")

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address(url) for url in self.planes)

    @property
    def view(self) -> View:
        """What the survey needs to know beforehand."""
        first = next(iter(self.addresses), None)
        return View(
            root=self.root,
            state=self.directory,
            weights=self.path(self.weights),
            period=self.survey_every,
            fabrics=self.fabrics,
            roles=self.roles,
            rails=self.rails,
            address=self.address,
            imex=self.imex,
            reserve=self.memory_reserve,
            plane=f"{first.host}:{first.port}" if first else "",
        )

    def path(self, relative: Path) -> Path:
        """A path of these settings, as it is from anywhere."""
        return self.directory / relative

    def name(self) -> NodeId:
        """The name from the settings, or the host's. A node with a certificate takes the certificate's instead."""
        return NodeId(self.node) if self.node else host_name()


def host_name() -> NodeId:
    """This machine's name as a node's. Raises BadInput for one that cannot be a node's, or that every machine has."""
    name = socket.gethostname()
    try:
        pki.check_name(name)
    except BadInput as error:
        raise BadInput(f"this machine's name {name!r} cannot be a node's", remedy=f"{NAMED}: {error.remedy}") from None
    if name.partition(".")[0] == "localhost":
        raise BadInput(f"this machine is called {name!r}, as any other may be", remedy=NAMED)
    return NodeId(name)


def load(path: Path | None, *, directory: Path | None = None, environ: Mapping[str, str] | None = None) -> NodeSettings:
    """The settings of a node; `directory` replaces what the file says. Raises BadInput."""
    settings = config.load(NodeSettings, path, PREFIX, environ)
    return attrs.evolve(settings, directory=config.home(settings.directory, path, directory, DIRECTORY, ETC))


def find(config_file: Path | None, directory: Path | None) -> Path | None:
    """Where node.toml is; None when there is none, and the defaults count."""
    place = (directory or DIRECTORY) / "node.toml"
    found = config.find(config_file, f"{PREFIX}_CONFIG", *([place] if directory else [ETC, place]))
    if found is not None and not found.is_file():
        raise BadInput(f"{found} is not a file", remedy="see --config")
    return found
