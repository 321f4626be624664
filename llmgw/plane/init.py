"""Makes a plane out of an empty directory: CA, certificates, the admin API's token, plane.toml."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from llmgw import pki
from llmgw.errors import Conflict
from llmgw.files import PRIVATE, make_directory, write_whole
from llmgw.pki import Role
from llmgw.plane.bearers import new_bearer
from llmgw.plane.own import ADMIN, ADMIN_TOKEN, CA, CA_KEY, SERVER, machine_hosts, server_name
from llmgw.plane.settings import PlaneSettings

_TOML = """\
# Settings of this plane; paths are relative to this file. `llmgw-plane check` reads it and says what is wrong.
name = {name}

# Names and addresses, beyond this machine's own, under which agents and operators reach this plane.
hosts = {hosts}

agents_listen = "{settings.agents_listen}"    # agents, with certificates
admin_listen = "{settings.admin_listen}"    # `llmgw ctl` and the page; 0.0.0.0:7444 opens it to other machines
gateway_listen = "{settings.gateway_listen}"    # the OpenAI API

# What should be served: see `llmgw ctl apply`.
models = "{settings.models}"
"""


@attrs.frozen
class Made:
    """What `init` made."""

    directory: Path
    fingerprint: str
    hosts: tuple[str, ...]


def init(directory: Path, hosts: Sequence[str] = (), wall: Callable[[], float] = time.time) -> Made:
    """Make a plane's identity. Raises Conflict when there is one: a new CA would lock every node out."""
    further = [pki.check_host(host) for host in hosts]
    directory = directory.absolute()
    if (directory / CA_KEY).exists():
        raise Conflict(
            f"{directory} holds a plane already",
            remedy="start it with `llmgw-plane run`, add names under `hosts` in plane.toml, or choose another --dir",
        )
    make_directory(directory)
    name, reached = socket.gethostname()[:64] or "plane", machine_hosts(further)
    now = wall()
    ca = pki.make_ca(f"llmgw {name}", now)
    server = _identity(ca, server_name(name), Role.PLANE, pki.PLANE_LIFE, now, reached)
    write_whole(directory / SERVER, server, PRIVATE)
    write_whole(directory / ADMIN, _identity(ca, "admin", Role.ADMIN, pki.ADMIN_LIFE, now), PRIVATE)
    write_whole(directory / ADMIN_TOKEN, (new_bearer() + "\n").encode(), PRIVATE)
    write_whole(directory / CA, ca.pem.encode())
    settings = directory / "plane.toml"
    if not settings.exists():
        # JSON's strings and lists of strings are TOML's.
        text = _TOML.format(name=json.dumps(name), hosts=json.dumps(further), settings=PlaneSettings())
        write_whole(settings, text.encode())
    # The key comes last: a directory without it is unfinished, and `init` may run again there.
    write_whole(directory / CA_KEY, pki.key_to_pem(ca.key).encode(), PRIVATE)
    return Made(directory, ca.fingerprint, reached)


def _identity(ca: pki.Authority, name: str, role: Role, life: float, now: float, hosts: Sequence[str] = ()) -> bytes:
    """A new key and its certificate (PEM)."""
    key = pki.make_key()
    leaf = ca.issue(key.public_key(), name, role, now=now, life=life, hosts=hosts)
    return (pki.key_to_pem(key) + pki.to_pem(leaf)).encode()
