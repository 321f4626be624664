from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from llmgw import pki, tls
from llmgw.errors import BadInput, Conflict, LlmgwError
from llmgw.plane.bearers import Bearers
from llmgw.plane.check import check
from llmgw.plane.init import init
from llmgw.plane.own import ADMIN, ADMIN_TOKEN, CA, CA_KEY, SERVER, load_ca
from llmgw.plane.settings import load


def test_an_empty_directory_becomes_a_plane(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "plane"
    made = init(directory, ["gw.example", "10.9.9.9"])
    ca = load_ca(directory)
    assert ca.fingerprint == made.fingerprint
    for name, role in ((SERVER, pki.Role.PLANE), (ADMIN, pki.Role.ADMIN)):
        leaf = pki.read_certificate((directory / name).read_bytes(), name)
        assert pki.verify(leaf, ca.certificate, now=time.time(), role=role)
        tls.client_context(directory / CA, directory / name)
    server = pki.read_certificate((directory / SERVER).read_bytes(), SERVER)
    assert {"gw.example", "10.9.9.9", "127.0.0.1", "localhost"} <= pki.hosts(server)
    token = (directory / ADMIN_TOKEN).read_text().strip()
    assert Bearers.load(directory / ADMIN_TOKEN)(token) == "admin"
    secret = (CA_KEY, SERVER, ADMIN, ADMIN_TOKEN)
    assert [stat.S_IMODE((directory / name).stat().st_mode) for name in secret] == [0o600] * 4
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_settings_that_are_written_are_read_back(tmp_path: Path) -> None:
    init(tmp_path, ["gw.example"])
    settings = load(tmp_path / "plane.toml", environ={})
    assert (settings.directory, settings.hosts) == (tmp_path, ("gw.example",))
    lines = list(check(settings, tmp_path / "plane.toml"))
    assert [line[:20] for line in lines if line.startswith("server.pem")] == ["server.pem: good for"]


def test_a_plane_is_never_overwritten(tmp_path: Path) -> None:
    """A new CA would lock every node out."""
    init(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Conflict, match="holds a plane already: start it with `llmgw-plane run`"):
        init(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_that_was_left_unfinished_is_finished(tmp_path: Path) -> None:
    init(tmp_path)
    (tmp_path / CA_KEY).unlink()
    (tmp_path / "plane.toml").write_text('name = "mine"\n')
    init(tmp_path)
    load_ca(tmp_path)
    assert load(tmp_path / "plane.toml", environ={}).name == "mine"


def test_a_host_that_cannot_be_one_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'http://x' is neither a host name nor an address"):
        init(tmp_path / "plane", ["http://x"])
    assert not (tmp_path / "plane").exists()


def test_a_place_where_nothing_can_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmgwError, match="is a file, where a directory is due"):
        init(tmp_path / "file")


def test_a_ca_that_others_can_read_or_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    init(tmp_path)
    (tmp_path / CA_KEY).chmod(0o644)
    with pytest.raises(LlmgwError, match=r"ca\.key \(the CA's key\) can be read by others .*chmod 600"):
        load_ca(tmp_path)
    (tmp_path / CA_KEY).chmod(0o600)
    (tmp_path / CA).write_text(pki.make_ca("other", time.time()).pem)
    with pytest.raises(BadInput, match=r"ca\.key is not the key of .*ca\.pem"):
        load_ca(tmp_path)
    (tmp_path / CA_KEY).unlink()
    with pytest.raises(LlmgwError, match=r"ca\.key is missing .*: make one with `llmgw-plane init --dir"):
        load_ca(tmp_path)
