"""The plane's own identity on disk: the CA, the server's certificate, an administrator's, and their renewal.

Key and certificate are one file each, so that a renewal swaps both in one step; listeners take a new one with the
next handshake (`llmgw.tls.ServerTls`).
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import psutil
import structlog
import trio

from llmgw import pki
from llmgw.errors import BadInput, LlmgwError
from llmgw.files import PRIVATE, read_whole, refuse_shared, write_whole
from llmgw.pki import Peer, Role
from llmgw.plane.certs import Authority, expiry_warning

log = structlog.get_logger("llmgw.own")

CA_KEY, CA, SERVER, ADMIN, ADMIN_TOKEN = "ca.key", "ca.pem", "server.pem", "admin.pem", "admin.token"
#: How often certificates are looked at, in seconds: the machine's clock may be set.
LOOK_EVERY = 3600.0


def load_ca(directory: Path) -> pki.Authority:
    """The fleet's CA. Raises LlmgwError when it is missing, does not fit together, or others can read its key."""
    remedy = f"make one with `llmgw-plane init --dir {directory}`"
    key_pem = read_whole(directory / CA_KEY, "the CA's key", remedy)
    certificate = pki.read_certificate(read_whole(directory / CA, "the fleet's CA", remedy), str(directory / CA))
    refuse_shared(directory / CA_KEY, "the CA's key")
    key = pki.read_key(key_pem, str(directory / CA_KEY))
    if key.public_key() != certificate.public_key():
        raise BadInput(
            f"{directory / CA_KEY} is not the key of {directory / CA}", remedy="restore both from one backup"
        )
    return pki.Authority(certificate, key)


@attrs.frozen
class Own:
    """The plane's own certificates in a directory."""

    directory: Path
    authority: Authority
    name: str
    hosts: tuple[str, ...]
    wall: Callable[[], float] = time.time

    @property
    def ca(self) -> Path:
        return self.directory / CA

    @property
    def server(self) -> Path:
        return self.directory / SERVER

    async def freshen(self) -> None:
        """Renew what is due, or does not cover the names we are reached by; tell the records of all.

        Raises LlmgwError when a file cannot be written.
        """
        await self._freshen(SERVER, server_name(self.name), Role.PLANE, self.hosts)
        if (self.directory / ADMIN).exists():
            await self._freshen(ADMIN, "admin", Role.ADMIN, ())

    async def run(self) -> None:
        """Keep them fresh until cancelled, and warn of nodes that do not renew."""
        while True:
            await trio.sleep(LOOK_EVERY)
            try:
                await self.freshen()
            except LlmgwError as error:
                log.error("own certificate not renewed", error=str(error))
            for warning in expiry_warning(self.authority.list(), self.wall()):
                log.warning(warning)

    async def _freshen(self, file: str, name: str, role: Role, hosts: tuple[str, ...]) -> None:
        path = self.directory / file
        peer = self._usable(path, role, hosts)
        if peer is None:
            pem, peer = self.authority.sign_own(name, role, hosts)
            write_whole(path, pem.encode(), PRIVATE)
            log.info("own certificate issued", file=str(path), role=role, until=pki.utc(peer.not_after))
        await self.authority.record(peer)

    def _usable(self, path: Path, role: Role, hosts: Iterable[str]) -> Peer | None:
        try:
            pem = path.read_bytes()
            leaf = pki.read_certificate(pem, str(path))
            if pki.read_key(pem, str(path)).public_key() != leaf.public_key():
                return None
            peer = pki.verify(leaf, self.authority.ca.certificate, now=self.wall(), role=role)
        except (OSError, LlmgwError):
            return None
        covered = all(pki.covers(pki.hosts(leaf), host) for host in hosts)
        return peer if covered and self.wall() < pki.renew_at(peer) and not self.authority.refused(peer) else None


def machine_hosts(further: Iterable[str] = ()) -> tuple[str, ...]:
    """The names and addresses this machine is reached by, then `further` ones; link-local ones are left out."""
    found: dict[str, None] = dict.fromkeys(["localhost", "127.0.0.1", "::1"])
    try:
        found[pki.check_host(socket.gethostname())] = None
    except LlmgwError:
        log.warning("the host's name cannot be in a certificate", name=socket.gethostname())
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                plain = ipaddress.ip_address(address.address.partition("%")[0])
                if not plain.is_link_local:
                    found[str(plain)] = None
    return tuple(found | dict.fromkeys(map(pki.check_host, further)))


def server_name(name: str) -> str:
    """The name in the certificate of the plane that is called `name`."""
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in ".-_") else "-" for letter in name)
    return ("plane-" + kept[:56]).rstrip(".-_")
