"""plane.toml: everything that an operator may decide about a plane, with its default."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import attrs

from llmgw import config, pki
from llmgw.config import Listen, LogSettings, PackageSettings
from llmgw.errors import BadInput
from llmgw.plane.gateway.route import StaticEndpoint
from llmgw.plane.gateway.settings import GatewaySettings
from llmgw.plane.models import ENGINES
from llmgw.plane.world import Settings as Judgement
from llmgw.toml import Seconds, near
from llmgw.wire.facts import EngineInstall, EnginePackage

PREFIX = "LLMGW_PLANE"
DIRECTORY = Path("/var/lib/llmgw-plane")
ETC = Path("/etc/llmgw/plane.toml")


@attrs.frozen
class Gateway(GatewaySettings):
    """[gateway]. `inside` runs it in the plane's own process; else `llmgw-plane gateway` does."""

    inside: bool = True


@attrs.frozen
class PlaneSettings:
    """plane.toml. Paths are relative to `directory`, and that to the file; by default it is where the file is."""

    directory: Path = Path()
    name: str = attrs.field(factory=lambda: socket.gethostname()[:64] or "plane")

    #: Where agents connect, where operators do, and where applications do.
    agents_listen: Listen = Listen("0.0.0.0", 7443)
    admin_listen: Listen = Listen("127.0.0.1", 7444)
    gateway_listen: Listen = Listen("0.0.0.0", 7480)
    #: Further names and addresses under which this plane is reached: they go into its certificate.
    hosts: tuple[str, ...] = ()
    #: Where machines are told to join, wss://HOST:PORT; "": at the first of `hosts`, else at the name.
    advertise: str = ""

    heartbeat: Seconds = attrs.field(default=5.0, validator=[attrs.validators.ge(0.2), attrs.validators.le(60.0)])
    judgement: Annotated[Judgement, "seconds"] = Judgement()

    #: How often each InfiniBand fabric is mapped (D8).
    scan_every: Seconds = attrs.field(default=300.0, validator=attrs.validators.ge(10.0))

    store: Path = Path("plane.db")
    models: Path = Path("models.toml")
    #: Files of bearer tokens for the admin API, one a line.
    admin_tokens: Path = Path("admin.token")

    #: [[endpoints]]: engines that this plane does not run.
    endpoints: tuple[StaticEndpoint, ...] = ()
    gateway: Annotated[Gateway, "seconds"] = Gateway()
    #: Engines that every node which can should have: name -> version, "" for any.
    engines: Mapping[str, str] = attrs.field(factory=dict)
    #: Where nodes get an engine, when not from PyPI under its own name.
    packages: Mapping[str, PackageSettings] = attrs.field(factory=dict)

    log: LogSettings = LogSettings()
    insecure: bool = False

    def __attrs_post_init__(self) -> None:
        listens = {
            "agents_listen": self.agents_listen,
            "admin_listen": self.admin_listen,
            "gateway_listen": self.gateway_listen,
        }
        # The gateway speaks plain HTTP in any mode: it is for a trusted network, or stands behind a TLS proxy.
        config.refuse_insecure(
            self.insecure, {key: listen.host for key, listen in listens.items() if key != "gateway_listen"}
        )
        ports = [listen.port for listen in listens.values() if listen.port]
        if len(set(ports)) < len(ports):
            raise ValueError(f"each listener needs a port of its own, not {', '.join(map(str, listens.values()))}")
        judged = self.judgement
        if not self.heartbeat < judged.unreachable_after < judged.lost_after:
            raise ValueError(
                f"heartbeat ({self.heartbeat:g} s) must be below unreachable_after ({judged.unreachable_after:g} s), "
                f"and that below lost_after ({judged.lost_after:g} s)"
            )
        if not 0 < judged.together_share <= 1:
            raise ValueError(
                f"together_share is a share of the fleet, above 0 and at most 1, not {judged.together_share:g}"
            )
        if self.advertise:
            self._check_advertised()
        for host in self.hosts:
            pki.check_host(host)
        for engine in (*self.engines, *self.packages):
            if engine not in ENGINES:
                meant = near(engine, ENGINES)
                words = f"did you mean {meant!r}?" if meant else f"there are {', '.join(ENGINES)}"
                raise ValueError(f"there is no engine {engine!r}: {words}")
        for engine, version in self.engines.items():
            config.check_version(engine, version)

    def _check_advertised(self) -> None:
        try:
            parts = urlsplit(self.advertise)
            pki.check_host(parts.hostname or "")
            good = parts.scheme in ("wss", "ws") and parts.port != 0 and not parts.path.strip("/")
        except (ValueError, BadInput):
            good = False
        if not good:
            meant = f"wss://{self.advertise}" if "://" not in self.advertise else "wss://plane.example:7443"
            raise ValueError(f"advertise is {self.advertise!r}, where an agents' address such as {meant} is due")

    @property
    def reached(self) -> tuple[str, ...]:
        """What the certificate names beside this machine's own names and addresses: `hosts`, and where to join."""
        host = urlsplit(self.agents_url).hostname or ""
        try:
            return tuple(dict.fromkeys((*self.hosts, pki.check_host(host))))
        except BadInput:
            return self.hosts  # a plane may be called what no machine can be

    @property
    def wanted_engines(self) -> tuple[EngineInstall, ...]:
        return tuple(EngineInstall(engine=name, version=version) for name, version in sorted(self.engines.items()))

    @property
    def engine_packages(self) -> dict[str, EnginePackage]:
        return {engine: package.told for engine, package in sorted(self.packages.items())}

    @property
    def agents_url(self) -> str:
        """Where agents of other machines find this plane."""
        host = self.hosts[0] if self.hosts else self.name
        return self.advertise or f"wss://{Listen(host, self.agents_listen.port)}"

    def path(self, relative: Path) -> Path:
        """A path of these settings, as it is from anywhere."""
        return self.directory / relative


def load(
    path: Path | None, *, directory: Path | None = None, environ: Mapping[str, str] | None = None
) -> PlaneSettings:
    """The settings of a plane; `directory` replaces what the file says. Raises BadInput."""
    settings = config.load(PlaneSettings, path, PREFIX, environ)
    return attrs.evolve(settings, directory=config.home(settings.directory, path, directory, DIRECTORY, ETC))


def find(config_file: Path | None, directory: Path | None) -> Path | None:
    """Where plane.toml is; None when there is none, and the defaults count."""
    place = (directory or DIRECTORY) / "plane.toml"
    found = config.find(config_file, f"{PREFIX}_CONFIG", *([place] if directory else [ETC, place]))
    if found is not None and not found.is_file():
        raise BadInput(f"{found} is not a file", remedy="see --config")
    return found
