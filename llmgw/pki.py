"""The plane's own certificate authority: who a certificate names, who signed it, and until when.

One CA per fleet. A leaf's subject says all that is ever asked of it: CN is the name, OU the role. Keys are ECDSA
P-256: a handshake costs the plane little more than half of what RSA does. Everything here is pure: `now` comes in
as seconds since 1970, and files are somebody else's.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import BadInput, Refused
from llmgw.units import format_duration

DAY = 86400.0
CA_LIFE = 3652 * DAY
NODE_LIFE = 30 * DAY
PLANE_LIFE = 365 * DAY
ADMIN_LIFE = 365 * DAY
#: Certificates begin this long ago, so that a machine whose clock is behind takes them at once.
BACKDATE = 3600.0

_name = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_label = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_host = re.compile(rf"(\*\.)?{_label}(\.{_label})*")


class Role(StrEnum):
    """What a certificate's holder is to the plane."""

    NODE = "node"
    ADMIN = "admin"
    PLANE = "plane"
    NONE = "none"


@attrs.frozen
class Peer:
    """Whom a verified certificate names. `serial` is lower-case hexadecimal; times are seconds since 1970."""

    name: str
    role: str
    serial: str
    not_after: float
    not_before: float = 0.0


@attrs.frozen
class Authority:
    """A CA: its certificate, and the key that signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = attrs.field(repr=False)

    @property
    def pem(self) -> str:
        return to_pem(self.certificate)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        name: str,
        role: Role,
        *,
        now: float,
        life: float,
        hosts: Iterable[str] = (),
    ) -> x509.Certificate:
        """A leaf that names `name`. It never outlives the CA. Raises BadInput for a name that cannot be one."""
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is Role.PLANE:
            usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        ends = min(now + life, self.certificate.not_valid_after_utc.timestamp())
        builder = (
            _builder(public_key, _subject(check_name(name), role), self.certificate.subject, now - BACKDATE, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_authority_identifier(self.certificate), critical=False)
        )
        if names := [_general_name(host) for host in hosts]:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())


def make_ca(name: str, now: float) -> Authority:
    """A new CA, for ten years."""
    key = make_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    certificate = (
        _builder(key.public_key(), subject, subject, now - BACKDATE, now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_request(key: ec.EllipticCurvePrivateKey) -> str:
    """A CSR (PEM) that shows who holds the key. It asks for no name: the plane decides that."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def requested_key(request: str) -> ec.EllipticCurvePublicKey:
    """The public key of a CSR whose sender has shown that it holds the private one. Raises BadInput."""
    try:
        parsed = x509.load_pem_x509_csr(request.encode())
        good, key = parsed.is_signature_valid, parsed.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise BadInput("the certificate request cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadInput("the certificate request holds a key of another kind than ECDSA P-256")
    if not good:
        raise BadInput("the certificate request is not signed with the key it holds")
    return key


def check_name(name: str) -> str:
    """A name that a node or an admin can have. Raises BadInput."""
    if not _name.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot be a name",
            remedy="use 1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit at both ends",
        )
    return name


def check_host(host: str) -> str:
    """A name or address that a plane's certificate can have. Raises BadInput."""
    _general_name(host)
    return _plain(host)


def peer(certificate: x509.Certificate) -> Peer:
    """Whom a certificate names."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    roles = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return Peer(
        name=str(names[0].value) if names else "",
        role=str(roles[0].value) if roles else Role.NONE,
        serial=format(certificate.serial_number, "x"),
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
    )


def hosts(certificate: x509.Certificate) -> frozenset[str]:
    """The names and addresses under which a plane's certificate may be reached."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, in 43 characters that need no quoting anywhere."""
    return base64.urlsafe_b64encode(certificate.fingerprint(hashes.SHA256())).decode().rstrip("=")


def key_mark(key: ec.EllipticCurvePublicKey) -> str:
    """What tells one public key from another."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def verify(leaf: x509.Certificate, ca: x509.Certificate, *, now: float, role: Role, host: str = "") -> Peer:
    """Whom `leaf` names, if `ca` signed it, it is valid now, for that role, and for `host` when one is given.

    Raises Refused, saying which of them is not so.
    """
    try:
        leaf.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise Refused("the certificate is not signed by this fleet's CA", remedy="is this the right plane?") from None
    named = peer(leaf)
    if problem := when(named, now):
        raise Refused(problem)
    if named.role != role:
        raise Refused(f"the certificate of {named.name!r} is for a {named.role}, not for a {role}")
    if host and not covers(hosts(leaf), host):
        known = ", ".join(sorted(hosts(leaf))) or "nothing"
        raise Refused(
            f"the plane's certificate is not for {host!r}, only for {known}",
            remedy=f"connect by one of these, or add {host!r} to `hosts` in plane.toml and restart the plane "
            f"(`llmgw-plane init --host {host}` for a new one)",
        )
    return named


def when(named: Peer, now: float, whose: str = "the certificate") -> str:
    """What is wrong with a certificate's time as this machine's clock sees it; "" when nothing is."""
    if now < named.not_before:
        return (
            f"{whose} of {named.name!r} is not valid before {utc(named.not_before)} and this machine's clock says "
            f"{utc(now)}, {format_duration(named.not_before - now)} earlier: set the clock (is NTP running?)"
        )
    if now > named.not_after:
        return (
            f"{whose} of {named.name!r} expired at {utc(named.not_after)} and this machine's clock says {utc(now)}, "
            f"{format_duration(now - named.not_after)} later: renew it, or set the clock if that is wrong"
        )
    return ""


def covers(names: Iterable[str], host: str) -> bool:
    """Is `host`, a name or an address, one of `names`? A leading "*." stands for one label."""
    wanted = _plain(host)
    parent = wanted.partition(".")[2]
    return any(name == wanted or (name == f"*.{parent}" and bool(parent)) for name in map(_plain, names))


def renew_at(named: Peer) -> float:
    """When a certificate is due for renewal: at two thirds of its life and a little, not all of a fleet at once."""
    begins = named.not_before + BACKDATE
    # The serial is random and stays the same over restarts, which a number drawn at each start would not.
    roll = int(named.serial, 16) % 1000 / 1000
    return begins + (named.not_after - begins) * (2 / 3 + 0.05 * roll)


def utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- text and back -----------------------------------------------------------------------------------


def to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def read_certificate(pem: str | bytes, what: str) -> x509.Certificate:
    """The first certificate of a PEM text. Raises BadInput that names `what`."""
    try:
        return x509.load_pem_x509_certificates(pem.encode() if isinstance(pem, str) else pem)[0]
    except (ValueError, IndexError):
        raise BadInput(f"{what} holds no certificate (PEM) that can be read") from None


def read_key(pem: str | bytes, what: str) -> ec.EllipticCurvePrivateKey:
    """The private key of a PEM text. Raises BadInput that names `what`."""
    try:
        key = serialization.load_pem_private_key(pem.encode() if isinstance(pem, str) else pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadInput(f"{what} holds no private key (PEM) that can be read") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{what} holds a key of another kind than ECDSA")
    return key


# --- parts of certificates ---------------------------------------------------------------------------


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, begins: float, ends: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(begins, UTC))
        .not_valid_after(datetime.fromtimestamp(ends, UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(name: str, role: Role) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role), x509.NameAttribute(NameOID.COMMON_NAME, name)]
    )


def _authority_identifier(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    plain = _plain(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(plain))
    except ValueError:
        pass
    if not _host.fullmatch(plain) or len(plain) > 253:
        raise BadInput(f"{host!r} is neither a host name nor an address") from None
    return x509.DNSName(plain)


def _plain(host: str) -> str:
    bare = host.strip().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare.lower().removesuffix(".")
