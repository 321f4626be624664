from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from llmgw import pki
from llmgw.errors import BadInput, Refused
from llmgw.pki import DAY, NODE_LIFE, Authority, Role
from tests.fakes.clock import NEW_YEAR as NOW


@pytest.fixture(scope="module")
def ca() -> Authority:
    return pki.make_ca("llmgw test", NOW)


def leaf(
    ca: Authority, name: str = "gpu-01", role: Role = Role.NODE, *, now: float = NOW, **more: object
) -> x509.Certificate:
    hosts = more.get("hosts", ())
    assert isinstance(hosts, tuple)
    return ca.issue(pki.make_key().public_key(), name, role, now=now, life=NODE_LIFE, hosts=hosts)


def test_a_certificate_says_name_role_serial_and_until_when(ca: Authority) -> None:
    peer = pki.peer(leaf(ca))
    assert (peer.name, peer.role) == ("gpu-01", "node")
    assert peer.not_after == NOW + NODE_LIFE
    assert int(peer.serial, 16) > 0


def test_a_certificate_begins_an_hour_ago_for_machines_whose_clocks_are_behind(ca: Authority) -> None:
    """TL01: a clock that is 30 s behind must not see a certificate from the future."""
    made = leaf(ca)
    assert pki.verify(made, ca.certificate, now=NOW - 30, role=Role.NODE).name == "gpu-01"
    assert pki.verify(made, ca.certificate, now=NOW - 3599, role=Role.NODE).name == "gpu-01"


def test_a_clock_too_far_behind_is_named_as_the_cause(ca: Authority) -> None:
    with pytest.raises(Refused, match=r"not valid before .* this machine's clock says .* 1h earlier: set the clock"):
        pki.verify(leaf(ca), ca.certificate, now=NOW - 7200, role=Role.NODE)


def test_an_expired_certificate_is_refused_with_both_times(ca: Authority) -> None:
    with pytest.raises(Refused, match=r"expired at 2026-01-31 00:00:00 UTC .* clock says 2026-02-01 .* 1d later"):
        pki.verify(leaf(ca), ca.certificate, now=NOW + NODE_LIFE + DAY, role=Role.NODE)


def test_a_certificate_of_another_ca_is_refused_even_with_the_same_names(ca: Authority) -> None:
    other = pki.make_ca("llmgw test", NOW)
    with pytest.raises(Refused, match="not signed by this fleet's CA"):
        pki.verify(leaf(other), ca.certificate, now=NOW, role=Role.NODE)


def test_a_node_cannot_pass_for_a_plane(ca: Authority) -> None:
    with pytest.raises(Refused, match="the certificate of 'gpu-01' is for a node, not for a plane"):
        pki.verify(leaf(ca), ca.certificate, now=NOW, role=Role.PLANE)


def test_a_host_that_the_certificate_does_not_name_is_refused_with_those_it_does(ca: Authority) -> None:
    made = leaf(ca, "plane", Role.PLANE, hosts=("plane.example", "10.0.0.1", "::1"))
    for good in ("plane.example", "PLANE.example.", "10.0.0.1", "::1", "[::1]", "0:0:0:0:0:0:0:1"):
        assert pki.verify(made, ca.certificate, now=NOW, role=Role.PLANE, host=good)
    with pytest.raises(
        Refused, match=r"not for '10.0.0.2', only for 10.0.0.1, ::1, plane.example.*init --host 10.0.0.2"
    ):
        pki.verify(made, ca.certificate, now=NOW, role=Role.PLANE, host="10.0.0.2")


@pytest.mark.parametrize(
    ("name", "host", "good"),
    [
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "a.b.example.org", False),
        ("*.example.org", "example.org", False),
        ("example.org", "example.org.", True),
        ("example.org", "badexample.org", False),
    ],
)
def test_a_star_stands_for_one_label(name: str, host: str, good: bool) -> None:
    assert pki.covers([name], host) is good


def test_a_leaf_never_outlives_its_ca(ca: Authority) -> None:
    late = NOW + pki.CA_LIFE - DAY
    assert pki.peer(leaf(ca, now=late)).not_after == ca.certificate.not_valid_after_utc.timestamp()


def test_a_requests_own_subject_is_not_looked_at(ca: Authority) -> None:
    key = pki.make_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "admin")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    asked = pki.requested_key(request.public_bytes(serialization.Encoding.PEM).decode())
    made = ca.issue(asked, "gpu-01", Role.NODE, now=NOW, life=DAY)
    assert pki.peer(made).name == "gpu-01"
    assert made.public_key() == key.public_key()


def test_a_request_gives_its_key_back() -> None:
    key = pki.make_key()
    assert pki.requested_key(pki.make_request(key)) == key.public_key()


def _other_kind() -> str:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _other_curve() -> str:
    key = ec.generate_private_key(ec.SECP384R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _broken_signature() -> str:
    der = bytearray(
        x509.load_pem_x509_csr(pki.make_request(pki.make_key()).encode()).public_bytes(serialization.Encoding.DER)
    )
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (lambda: "", "cannot be read"),
        (lambda: "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----", "cannot be read"),
        (_other_kind, "another kind than ECDSA P-256"),
        (_other_curve, "another kind than ECDSA P-256"),
        (_broken_signature, "not signed with the key it holds|cannot be read"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(request_: object, words: str) -> None:
    assert callable(request_)
    with pytest.raises(BadInput, match=words):
        pki.requested_key(request_())


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "a" * 65, "ä", "a/b", "a\nb", ".."])
def test_a_name_that_cannot_be_one_is_refused(name: str, ca: Authority) -> None:
    with pytest.raises(BadInput, match="cannot be a name"):
        leaf(ca, name)


@pytest.mark.parametrize("host", ["", "a b", "-", "a..b", "ä.example", "a" * 64 + ".example", "http://x"])
def test_a_host_that_cannot_be_one_is_refused(host: str) -> None:
    with pytest.raises(BadInput, match="neither a host name nor an address"):
        pki.check_host(host)


def test_renewal_is_due_after_two_thirds_of_the_life_and_not_at_once_for_all(ca: Authority) -> None:
    due = {pki.renew_at(pki.peer(leaf(ca, f"gpu-{number}"))) for number in range(20)}
    assert all(NOW + NODE_LIFE * 2 / 3 <= moment < NOW + NODE_LIFE * 0.72 for moment in due)
    assert len(due) > 10


def test_keys_and_certificates_survive_the_way_through_pem(ca: Authority) -> None:
    key = pki.make_key()
    assert pki.read_key(pki.key_to_pem(key), "x").private_numbers() == key.private_numbers()
    assert pki.read_certificate(ca.pem, "x") == ca.certificate


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_no_pem_is_named(text: str) -> None:
    with pytest.raises(BadInput, match=r"ca\.pem holds no certificate"):
        pki.read_certificate(text, "ca.pem")
    with pytest.raises(BadInput, match=r"ca\.key holds no private key"):
        pki.read_key(text, "ca.key")


def test_the_fingerprint_is_of_the_whole_certificate(ca: Authority) -> None:
    assert len(ca.fingerprint) == 43
    assert ca.fingerprint != pki.make_ca("llmgw test", NOW).fingerprint


def test_the_keys_signature_on_the_ca_is_its_own_and_it_may_sign_no_other_ca(ca: Authority) -> None:
    constraints = ca.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert ca.certificate.not_valid_after_utc - ca.certificate.not_valid_before_utc > datetime.timedelta(days=3650)


@given(st.text(max_size=80))
def test_any_text_is_a_name_or_is_refused(text: str) -> None:
    try:
        assert pki.check_name(text) == text
    except BadInput as error:
        assert repr(text) in str(error)  # noqa: PT017
