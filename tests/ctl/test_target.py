"""Which plane ctl speaks to: each place in its turn, and what is wrong in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.ctl.target import Given, Target, find_target
from llmgw.errors import BadInput, LlmgwError, NotFound, Refused

NOTHING = Path("/nowhere")


def found(
    tmp_path: Path,
    options: Given | None = None,
    env: dict[str, str] | None = None,
    directory: Path | None = None,
    local: Path = NOTHING,
) -> Target:
    return find_target(options or Given(), env or {}, tmp_path, directory, local)


def plane_directory(path: Path, settings: str = 'admin_listen = "0.0.0.0:9000"\n') -> Path:
    path.mkdir()
    (path / "plane.toml").write_text(settings)
    (path / "admin.token").write_text("# for people\nalice lga-0123456789abcdef\n")
    (path / "ca.pem").write_text("")
    return path


def test_options_come_first_then_the_environment(tmp_path: Path) -> None:
    env = {"LLMGW_PLANE": "https://env:1", "LLMGW_TOKEN": "from-env", "LLMGW_CA": "/env/ca.pem"}
    assert found(tmp_path, env=env) == Target("https://env:1", Path("/env/ca.pem"), "from-env")
    options = Given(plane="option:2", cert=Path("/me.pem"))
    assert found(tmp_path, options, env) == Target("https://option:2", Path("/env/ca.pem"), cert=Path("/me.pem"))


def test_a_planes_directory_has_it_all(tmp_path: Path) -> None:
    home = plane_directory(tmp_path / "p")
    expected = Target("https://127.0.0.1:9000", home / "ca.pem", "lga-0123456789abcdef")
    assert found(tmp_path, directory=home) == expected
    assert found(tmp_path, local=home) == expected


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ("", "https://127.0.0.1:7444"),
        ('admin_listen = ":7500"', "https://127.0.0.1:7500"),
        ('admin_listen = "[::]:7500"', "https://[::1]:7500"),
        ('admin_listen = "[fd00::1]:7500"', "https://[fd00::1]:7500"),
        ('admin_listen = "10.0.0.5:7500"', "https://10.0.0.5:7500"),
        ('insecure = true\nadmin_listen = "127.0.0.1:7500"', "http://127.0.0.1:7500"),
    ],
)
def test_a_plane_that_listens_everywhere_is_reached_by_loopback(tmp_path: Path, settings: str, url: str) -> None:
    assert found(tmp_path, directory=plane_directory(tmp_path / "p", settings)).url == url


def test_the_users_own_file_comes_before_this_machines_plane(tmp_path: Path) -> None:
    config = tmp_path / ".config" / "llmgw" / "ctl.toml"
    config.parent.mkdir(parents=True)
    (tmp_path / "t").write_text("lga-from-a-file-of-mine\n")
    config.write_text(f'plane = "https://mine:1"\ntoken_file = "{tmp_path}/t"\n')
    target = found(tmp_path, local=plane_directory(tmp_path / "p"))
    assert (target.url, target.token) == ("https://mine:1", "lga-from-a-file-of-mine")


@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        ({}, BadInput, "no plane is given"),
        ({"LLMGW_PLANE": "https://x:1"}, Refused, "no token and no certificate"),
        ({"LLMGW_PLANE": "http://plane.example:1", "LLMGW_TOKEN": "t"}, BadInput, "in the clear"),
        ({"LLMGW_PLANE": "ftp://x", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://x:port", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://x/y", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://a b", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://a\udcff", "LLMGW_TOKEN": "t"}, BadInput, "no address"),
        ({"LLMGW_PLANE": "https://x:1", "LLMGW_TOKEN_FILE": "/nowhere/t"}, NotFound, "/nowhere/t is missing"),
        ({"LLMGW_PLANE": "https://x:1", "LLMGW_TOKEN": "two words"}, BadInput, "is no token"),
        ({"LLMGW_PLANE": "https://x:1", "LLMGW_TOKEN": "bad\nthing"}, BadInput, "is no token"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    tmp_path: Path, env: dict[str, str], error: type[LlmgwError], words: str
) -> None:
    with pytest.raises(error, match=words):
        found(tmp_path, env=env)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("plane.example", "https://plane.example:7444"),
        ("plane.example:1", "https://plane.example:1"),
        ("[fd00::1]", "https://[fd00::1]:7444"),
        ("https://plane.example", "https://plane.example"),
    ],
)
def test_a_bare_name_is_a_planes_machine(tmp_path: Path, given: str, url: str) -> None:
    assert found(tmp_path, env={"LLMGW_PLANE": given, "LLMGW_TOKEN": "t"}).url == url


def test_a_directory_that_is_no_planes(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is no plane's directory"):
        found(tmp_path, directory=tmp_path)


def test_a_misspelt_key_of_the_users_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / ".config" / "llmgw" / "ctl.toml"
    config.parent.mkdir(parents=True)
    config.write_text('plan = "https://mine:1"\n')
    with pytest.raises(BadInput, match="unknown key 'plan'"):
        found(tmp_path)
    config.write_text("plane = [\n")
    with pytest.raises(BadInput, match="cannot be read"):
        found(tmp_path)
    config.unlink()
    config.mkdir()
    with pytest.raises(BadInput, match=r"ctl\.toml is a directory, where a file is due"):
        found(tmp_path)


def test_an_empty_token_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("# nothing\n\n")
    with pytest.raises(BadInput, match="empty where a token is due"):
        found(tmp_path, env={"LLMGW_PLANE": "https://x:1", "LLMGW_TOKEN_FILE": str(tmp_path / "t")})


def test_a_token_is_never_shown_by_accident() -> None:
    assert "secret" not in repr(Target("https://x:1", None, "secret"))
