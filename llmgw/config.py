"""Settings from a TOML file and the environment, and what plane and node have in common in them.

A variable of the environment replaces the key of the same name: LLMGW_NODE_LOG_LEVEL is `level` in [log] of a node.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import attrs

from llmgw import toml
from llmgw.errors import BadInput
from llmgw.toml import Bytes, Environment, File, Table, load_toml, near
from llmgw.wire.facts import EnginePackage

T = TypeVar("T")


@attrs.frozen
class Listen:
    """Where to listen: "0.0.0.0:7443", "[::]:7443", ":7443". Port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Raises ValueError."""
        host, colon, port = text.strip().rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not an address to listen on: write HOST:PORT, such as 0.0.0.0:7443")
        bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if ":" in bare and not host.startswith("["):
            raise ValueError(f"{text!r} is not an address to listen on: write an IPv6 address in brackets, [::1]:7443")
        return cls(bare or ("0.0.0.0" if colon else "127.0.0.1"), int(port))

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@attrs.frozen
class LogSettings:
    """[log]: `format` "auto" is console on a terminal and JSON elsewhere; `lines` are kept for `ctl logs`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    lines: int = attrs.field(default=5000, validator=[attrs.validators.ge(100), attrs.validators.le(1_000_000)])


#: What a version, or a package's name, may consist of: neither a path nor an option of an installer can be made of it.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


def check_version(engine: str, version: str) -> None:
    """Raise ValueError for what cannot be one version of an engine's package; "" stands for any."""
    if version and not _VERSION.fullmatch(version):
        raise ValueError(f'{engine}: {version!r} is not a version: write one such as 0.32.0, or "" for any')


def check_package(name: str) -> None:
    """Raise ValueError for what cannot be a package's name; "" stands for the usual one."""
    if name and not _PACKAGE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a Python package; its version belongs into [engines]")


def check_requirements(requirements: Iterable[str]) -> None:
    """Raise ValueError for what an installer would take for an option of its own."""
    if bad := [word for word in requirements if not word.strip() or word.strip().startswith("-")]:
        raise ValueError(f"{bad[0]!r} is not a requirement: write one such as torch==2.13.0+cpu")


def _check_package(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    check_package(value)


def _check_requirements(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    check_requirements(value)


def _check_index(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_indexes(_, attribute, (value,))


def _check_indexes(_: object, attribute: object, value: tuple[str, ...]) -> None:
    for url in value:
        if url and not re.fullmatch(r"(https?|file)://\S+", url):
            raise ValueError(f"{url!r} is not the address of a package index: write https://HOST/simple")


@attrs.frozen
class PackageSettings:
    """[packages.NAME]: where an engine is installed from. Of a node's own settings each key wins that is there.

    `cpu` is the package for nodes without GPUs. `also` is installed with it; with `no_deps` nothing else is.
    """

    name: str = attrs.field(default="", validator=_check_package)
    cpu: str = attrs.field(default="", validator=_check_package)
    #: Instead of PyPI, and besides it. They may hold a password.
    index: str = attrs.field(default="", validator=_check_index, repr=False)
    extra_index: tuple[str, ...] = attrs.field(default=(), validator=_check_indexes, repr=False)
    also: tuple[str, ...] = attrs.field(default=(), validator=_check_requirements)
    no_deps: bool = False
    #: What the installation takes of the disk, downloads included; 0: as is usual for the engine.
    disk: Bytes = attrs.field(default=0, validator=attrs.validators.ge(0))

    @property
    def told(self) -> EnginePackage:
        return EnginePackage(
            name=self.name,
            cpu=self.cpu,
            index=self.index,
            extra_index=self.extra_index,
            also=self.also,
            no_deps=self.no_deps,
            disk_bytes=self.disk,
        )


def load(settings: type[T], path: Path | None, prefix: str, environ: Mapping[str, str] | None = None) -> T:
    """Settings from a file (None: from the environment alone). Raises BadInput, with the line where there is one."""
    environment = Environment(prefix, os.environ if environ is None else environ)
    refuse_misspelt(environment, toml.names(settings, environment) | {f"{prefix}_CONFIG"})
    table = load_toml(path, environment) if path else Table({}, File("settings"), environment=environment)
    return table.read(settings)


def refuse_misspelt(environment: Environment, known: frozenset[str]) -> None:
    """Raise for a variable that is almost one of ours. Others under our prefix are left alone.

    Kubernetes sets variables such as LLMGW_PLANE_SERVICE_HOST for a service of that name.
    """
    for name in environment.values:
        if not name.startswith(environment.prefix + "_") or name in known:
            continue
        meant = near(
            name.removeprefix(environment.prefix), [one.removeprefix(environment.prefix) for one in known], 0.85
        )
        if meant:
            raise BadInput(
                f"unknown setting {name} in the environment", remedy=f"did you mean {environment.prefix}{meant}?"
            )


def find(given: Path | None, variable: str, *places: Path) -> Path | None:
    """The settings file: the one that was given, or named by a variable, or the first that exists of `places`."""
    if given is not None:
        return given
    if named := os.environ.get(variable):
        return Path(named)
    return next((place for place in places if place.is_file()), None)


def home(said: Path, file: Path | None, given: Path | None, default: Path, etc: Path) -> Path:
    """The state directory: the one given on the command line, else what the file says, else where the file is."""
    if given is None and (file is None or file == etc):
        given = default if said == Path() else etc.parent / said
    if given is None and file is not None:
        given = file.parent / said
    return (given or default).absolute()


def is_loopback(host: str) -> bool:
    """Does this host never leave the machine?"""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def refuse_insecure(insecure: bool, hosts: Mapping[str, str]) -> None:
    """Raise ValueError when the insecure mode would be heard beyond this machine (A1). `hosts` by the key's name."""
    for key, host in hosts.items():
        if insecure and not is_loopback(host):
            raise ValueError(
                f"insecure mode works on loopback only, and {key} is {host}: use 127.0.0.1, or certificates"
            )
