"""`llmgw-plane check`: what a plane's settings and files come to, without running it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llmgw import pki
from llmgw.errors import LlmgwError
from llmgw.files import read_whole
from llmgw.plane.bearers import Bearers
from llmgw.plane.own import ADMIN, SERVER, load_ca, machine_hosts
from llmgw.plane.settings import PlaneSettings
from llmgw.plane.store.sqlite import look, schemas
from llmgw.units import format_duration


def check(settings: PlaneSettings, file: Path | None, wall: Callable[[], float] = time.time) -> Iterator[str]:
    """A line for each thing that is good. Raises LlmgwError at the first that is not."""
    yield f"settings: {file or 'defaults (there is no plane.toml)'}"
    listens = (settings.agents_listen, settings.admin_listen, settings.gateway_listen)
    yield "listens: agents {}, admin {}, gateway {}".format(*listens)
    yield _state(settings.path(settings.store))
    if settings.insecure:
        yield "INSECURE MODE: no certificates, loopback only"
        return
    ca = load_ca(settings.directory)
    yield f"CA: {ca.fingerprint}"
    for name in (SERVER, ADMIN):
        leaf = pki.read_certificate(read_whole(settings.directory / name), str(settings.directory / name))
        peer = pki.peer(leaf)
        if problem := pki.when(peer, wall()):
            raise LlmgwError(f"{name}: {problem}")
        yield f"{name}: good for {format_duration(peer.not_after - wall())} more"
        if name == SERVER:
            missing = [host for host in machine_hosts(settings.reached) if not pki.covers(pki.hosts(leaf), host)]
            if missing:
                yield f"{name}: does not name {', '.join(missing)} yet; it is made anew at the next start"
    Bearers.load(settings.path(settings.admin_tokens))
    yield "admin tokens: readable, and by their owner alone"


def _state(path: Path) -> str:
    """What the state's file is to this release. Raises StoreUnusable when the plane could not open it."""
    if not path.exists():
        return f"state: {path} is made at the first start"
    version, newest = look(path, len(schemas())), len(schemas())
    if not version:
        return f"state: {path} is empty"
    then = f", which is migrated to {newest} at the next start; a copy is made first" if version < newest else ""
    return f"state: {path}, schema {version}{then}"
