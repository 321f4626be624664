"""The certificates that the plane has given out: to whom, until when, and which are refused (A4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric import ec
from immutables import Map

from llmgw import pki
from llmgw.convert import near
from llmgw.errors import Conflict, LlmgwError, NotFound
from llmgw.pki import Peer, Role
from llmgw.plane.store import Moved, Store
from llmgw.units import format_duration
from llmgw.wire.control import Renewed

log = structlog.get_logger("llmgw.certs")

PREFIX = "certs/"
#: Certificates kept of one node: what it holds, what it may hold after a lost reply, and a few more.
MOST = 8


class Certificate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One certificate that was given out. Times are wall-clock seconds; `renews` is the serial it followed."""

    serial: str
    name: str
    role: str
    issued: float
    not_before: float
    not_after: float
    renews: str = ""
    token: str = ""  # the id of the token it was issued for
    revoked_at: float | None = None
    why: str = ""

    def state(self, now: float) -> str:
        """ "live", "renewal-due", "expired" or "revoked"."""
        if self.revoked_at is not None:
            return "revoked"
        if now > self.not_after:
            return "expired"
        return "renewal-due" if now >= pki.renew_at(self.peer) else "live"

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.role, self.serial, self.not_after, self.not_before)


class Authority:
    """Signs, remembers and revokes. `refused` answers from memory; everything that changes is stored first."""

    def __init__(self, ca: pki.Authority, store: Store, wall: Callable[[], float] = time.time) -> None:
        self.ca = ca
        self._store, self._wall = store, wall
        self._known: Map[str, Certificate] = Map()

    @property
    def ca_pem(self) -> str:
        return self.ca.pem

    @property
    def fingerprint(self) -> str:
        return self.ca.fingerprint

    async def load(self) -> None:
        """Read what the store knows: once at start, and when this plane begins to lead."""
        await self._reload()

    def list(self) -> tuple[Certificate, ...]:
        """Every certificate that is remembered: by name, then the newest first."""
        return tuple(sorted(self._known.values(), key=lambda found: (found.name, -found.issued)))

    def current(self, node: str) -> Certificate | None:
        """A node's newest certificate that is neither revoked nor expired."""
        live = [found for found in self._of(node) if self._lives(found)]
        return max(live, key=lambda found: found.issued, default=None)

    def revoked(self) -> tuple[str, ...]:
        """Serials of nodes' certificates that were revoked and have not expired: what nodes must hear of each other."""
        now = self._wall()
        return tuple(
            sorted(
                found.serial
                for found in self._known.values()
                if found.revoked_at is not None and found.role == Role.NODE and now <= found.not_after
            )
        )

    def refused(self, peer: Peer) -> str:
        """Why the holder of this (verified) certificate is refused; "" when it is welcome."""
        found = self._known.get(peer.serial)
        if found is not None and found.revoked_at is not None:
            because = f" ({found.why})" if found.why else ""
            return f"the certificate of {peer.name} was revoked at {pki.utc(found.revoked_at)}{because}: join again"
        if found is None and peer.role == Role.NODE:
            # Also what a state directory that was restored from an older copy looks like.
            return f"{peer.name} was deleted here, or this plane's state is an older copy: join again with a new token"
        return pki.when(peer, self._wall())

    def refuse_taken(self, node: str) -> None:
        """Raise Conflict when a live certificate has this name already."""
        if found := self.current(node):
            raise Conflict(
                f"{node} has joined already (its certificate is good until {pki.utc(found.not_after)})",
                remedy=f"join under another --name, or, if {node} was set up anew, "
                f"`llmgw ctl token create --node {node} --replace`",
            )

    async def issue(self, node: str, csr: str, *, replace: bool = False, token: str = "") -> str:
        """A node's first certificate (PEM). With `replace` its older ones are revoked.

        Raises BadInput for a request or a name that cannot be meant, Conflict when the name is taken.
        """
        key = pki.requested_key(csr)
        while True:
            revision = await self._reload()
            if not replace:
                self.refuse_taken(node)
            pem, record = self._sign(key, node, Role.NODE, pki.NODE_LIFE, token=token)
            changed = {record.serial: record}
            for old in self._of(node):
                if self._lives(old):
                    changed[old.serial] = self._revoked(old, "replaced by a new join")
            if await self._commit(changed, if_revision=revision):
                log.info("certificate issued", node=node, serial=record.serial, until=pki.utc(record.not_after))
                return pem

    async def renew(self, node: str, csr: str, presented: Peer) -> Renewed:
        """A new certificate for a node that holds one; an error in words when it gets none. The old one stays good.

        It must: the answer may be lost, and a stream shows the certificate it was opened with for as long as it lasts.
        """
        if presented.name != node or presented.role != Role.NODE:
            return Renewed(error=f"the certificate of {presented.name!r} cannot renew that of {node!r}")
        if (found := self._known.get(presented.serial)) is None or found.revoked_at is not None:
            return Renewed(error=self.refused(presented))
        try:
            key = pki.requested_key(csr)
            while True:
                revision = await self._reload()
                pem, record = self._sign(key, node, Role.NODE, pki.NODE_LIFE, renews=presented.serial)
                if await self._commit({record.serial: record}, if_revision=revision):
                    break
        except LlmgwError as error:
            log.warning("certificate not renewed", node=node, error=str(error))
            return Renewed(error=str(error))
        log.info("certificate renewed", node=node, serial=record.serial, until=pki.utc(record.not_after))
        return Renewed(certificate=pem)

    async def revoke(self, name: str, why: str = "") -> tuple[Certificate, ...]:
        """Refuse everything that this name holds, from now on; streams that are open are the caller's to end.

        Raises NotFound when the name holds nothing.
        """
        while True:
            revision = await self._reload()
            found = self._of(name)
            if not found:
                meant = near(name, {known.name for known in self._known.values()})
                remedy = f"did you mean {meant}?" if meant else "see `llmgw ctl certs`"
                raise NotFound(f"{name} has no certificate", remedy=remedy)
            changed = {old.serial: self._revoked(old, why) for old in found if self._lives(old)}
            if not changed or await self._commit(changed, if_revision=revision):
                log.warning("certificates revoked", name=name, count=len(changed), why=why)
                return tuple(changed.values())

    async def record(self, peer: Peer) -> None:
        """Remember a certificate that was made outside of this process (`llmgw-plane init`)."""
        if peer.serial not in self._known:
            issued = peer.not_before + pki.BACKDATE
            record = Certificate(
                serial=peer.serial,
                name=peer.name,
                role=peer.role,
                issued=issued,
                not_before=peer.not_before,
                not_after=peer.not_after,
            )
            await self._commit({record.serial: record})

    def sign_own(self, name: str, role: Role, hosts: Iterable[str] = ()) -> tuple[str, Peer]:
        """Key and certificate (PEM, in one text) for the plane itself or an admin, and whom it names."""
        key = pki.make_key()
        life = pki.PLANE_LIFE if role is Role.PLANE else pki.ADMIN_LIFE
        leaf = self.ca.issue(key.public_key(), name, role, now=self._wall(), life=life, hosts=hosts)
        return pki.key_to_pem(key) + pki.to_pem(leaf), pki.peer(leaf)

    def _sign(
        self, key: ec.EllipticCurvePublicKey, name: str, role: Role, life: float, *, renews: str = "", token: str = ""
    ) -> tuple[str, Certificate]:
        now = self._wall()
        leaf = self.ca.issue(key, name, role, now=now, life=life)
        named = pki.peer(leaf)
        record = Certificate(
            serial=named.serial,
            name=name,
            role=role,
            issued=now,
            not_before=named.not_before,
            not_after=named.not_after,
            renews=renews,
            token=token,
        )
        return pki.to_pem(leaf), record

    def _of(self, name: str) -> tuple[Certificate, ...]:
        return tuple(found for found in self._known.values() if found.name == name)

    def _lives(self, found: Certificate) -> bool:
        return found.revoked_at is None and found.not_after >= self._wall()

    def _revoked(self, found: Certificate, why: str) -> Certificate:
        return msgspec.structs.replace(found, revoked_at=self._wall(), why=why)

    async def _reload(self) -> int:
        snapshot = await self._store.load(PREFIX)
        records = (msgspec.json.decode(value, type=Certificate) for value in snapshot.values.values())
        self._known = Map({record.serial: record for record in records})
        return snapshot.revision

    async def _commit(self, changed: Mapping[str, Certificate], *, if_revision: int | None = None) -> bool:
        known = self._known.update(changed)
        fresh = {record.serial for record in changed.values()} | {record.renews for record in changed.values()}
        dropped = _superfluous(known.values(), self._wall(), fresh)
        puts = {PREFIX + serial: msgspec.json.encode(record) for serial, record in changed.items()}
        try:
            await self._store.commit(puts, [PREFIX + serial for serial in dropped], if_revision=if_revision)
        except Moved:
            return False
        self._known = Map({serial: record for serial, record in known.items() if serial not in dropped})
        return True


def _superfluous(known: Iterable[Certificate], now: float, fresh: Set[str]) -> frozenset[str]:
    """Serials that need no remembering: expired a day ago, or older than the newest few of one name.

    `fresh` are kept: what was just given out and what asked for it, whatever the clock says of their order.
    """
    dropped, by_name = set(), dict[str, list[Certificate]]()
    for record in known:
        if record.not_after < now - pki.DAY:
            dropped.add(record.serial)
        elif record.revoked_at is None:
            by_name.setdefault(record.name, []).append(record)
    for records in by_name.values():
        records.sort(key=lambda record: (record.serial not in fresh, -record.issued))
        dropped |= {record.serial for record in records[MOST:]}
    return frozenset(dropped)


def expiry_warning(certificates: Iterable[Certificate], now: float) -> tuple[str, ...]:
    """A sentence for each name whose newest certificate is well past its renewal: something keeps it from renewing."""
    newest: dict[str, Certificate] = {}
    for record in certificates:
        if record.revoked_at is None and (record.name not in newest or newest[record.name].issued < record.issued):
            newest[record.name] = record
    return tuple(
        f"the certificate of {name} expires in {format_duration(record.not_after - now)} and was not renewed"
        for name, record in sorted(newest.items())
        if pki.renew_at(record.peer) + pki.DAY < now <= record.not_after
    )
