from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import BadInput
from llmgw.node.host import host
from llmgw.node.settings import EngineSettings, NodeSettings, PortRange, load
from llmgw.wire.facts import EnginePackage


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> NodeSettings:
    file = tmp_path / "node.toml"
    file.write_text(text)
    return load(file, environ=environ or {})


def test_everything_has_a_default(tmp_path: Path) -> None:
    settings = read(tmp_path, "")
    assert settings == NodeSettings(directory=tmp_path)
    assert settings.engine_ports == PortRange(20000, 29999)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        node = "gpu-01"
        planes = ["wss://a.example:7443", "wss://[::1]"]
        address = "10.0.0.1"
        labels = { rack = "7" }
        weights = "/data/weights"
        engine_ports = "30000-30099"
        memory_reserve = "4GiB"
        root = "/host"
        [engines.llamacpp]
        command = ["/opt/llama-server", "--mlock"]
        env = { GGML_LOG = "1" }
        [fabrics]
        mlx5_0 = "compute"
        "mlx5_1*" = "storage-net"
        [roles]
        "mlx5_1*" = "storage"
        [rails]
        mlx5_0 = 3
        [logs]
        keep = 3
        bytes = "1MiB"
        [installs]
        directory = "/data/engines"
        installer = "pip"
        find_links = ["/srv/wheels"]
        offline = true
        within = "2h"
        keep = "7d"
        [packages.vllm]
        name = "our-vllm"
        """,
    )
    assert [str(plane) for plane in settings.addresses] == ["wss://a.example:7443", "wss://[::1]:7443"]
    assert settings.engines == {
        "llamacpp": EngineSettings(("/opt/llama-server", "--mlock"), env={"GGML_LOG": "1"}),
    }
    assert (settings.memory_reserve, settings.logs.keep, settings.logs.bytes) == (4 << 30, 3, 1 << 20)
    installs = settings.installs
    assert (settings.path(installs.directory), installs.installer) == (Path("/data/engines"), "pip")
    assert (installs.find_links, installs.offline) == (("/srv/wheels",), True)
    assert (installs.within, installs.keep) == (7200.0, 604800.0)
    assert settings.packages["vllm"].told == EnginePackage(name="our-vllm")
    view = settings.view
    assert (view.root, view.weights, view.state) == (Path("/host"), Path("/data/weights"), tmp_path)
    assert (view.fabrics, view.roles, view.rails) == (
        {"mlx5_0": "compute", "mlx5_1*": "storage-net"},
        {"mlx5_1*": "storage"},
        {"mlx5_0": 3},
    )
    assert view.plane == "a.example:7443"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plane = ['wss://a']", "line 1: unknown key 'plane': did you mean 'planes'"),
        ("node = 'a b'", "'a b' cannot be a name"),
        ("planes = ['https://a']", "'https://a' is no address of a plane"),
        ("planes = ['ws://10.0.0.1']", "is not encrypted"),
        ("planes = ['ws://127.0.0.1']", "is without TLS: use wss://, or set insecure = true"),
        ("insecure = true\nplanes = ['wss://10.0.0.1']", "insecure mode works on loopback only, and the plane wss://10.0.0.1"),
        ("node = 'a'\n[labels]\n'my rack' = '7'", "line 2: labels: 'my rack' cannot be a label's name"),
        ("engine_ports = '1-2'", "line 1: engine_ports: '1-2' is not a range of ports: from 1024"),
        ("engine_ports = '5000'", "line 1: engine_ports: '5000' is not a range of ports: write FIRST-LAST"),
        ("engine_ports = '3000-2000'", "the lower one first"),
        ("[engines.vllm]", "line 1: engines.vllm: the key 'command' is missing"),
        ("[installs]\noffline = true", "line 1: installs: offline without find_links: name the folder of wheels"),
        ("[installs]\ninstaller = 'conda'", "line 2: installs.installer: one of 'auto', 'uv', 'pip' is due"),
        ("[packages.vlm]\nname = 'x'", "there is no engine 'vlm' to install: there are llamacpp, sglang, vllm"),
        ("[engines.vllm]\ncommand = []", "line 2: engines.vllm.command: "),
        ("[engines.vllm]\ncommand = 'vllm serve'", "line 2: engines.vllm.command: a list is due"),
        ("[roles]\nmlx5_0 = 'storge'", "line 1: roles: one of 'fabric', 'storage', 'management' is due"),
        ("[rails]\nmlx5_0 = -1", "rails are numbered from 0"),
        ("memory_reserve = -1", "line 1: memory_reserve: a size"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


def test_the_insecure_mode_is_taken_on_loopback_only(tmp_path: Path) -> None:
    """A1"""
    assert read(tmp_path, "insecure = true\nplanes = ['ws://127.0.0.1:7443']").insecure


def test_the_environment_replaces_the_file(tmp_path: Path) -> None:
    environ = {"LLMGW_NODE_PLANES": "wss://b", "LLMGW_NODE_LABELS": "rack=8", "LLMGW_NODE_LOGS_KEEP": "9"}
    settings = read(tmp_path, "planes = ['wss://a']", environ)
    assert (settings.planes, settings.labels, settings.logs.keep) == (("wss://b",), {"rack": "8"}, 9)


@given(st.text())
def test_any_text_is_a_range_or_a_value_error(text: str) -> None:
    try:
        found = PortRange.parse(text)
    except ValueError:
        return
    assert 1024 <= found.first <= found.last <= 65535


@pytest.mark.parametrize(
    ("name", "words"),
    [("localhost", "as any other may be"), ("localhost.localdomain", "as any other may be"), ("node 7", "cannot be a")],
)
def test_a_machine_whose_name_says_nothing_is_asked_for_one(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    with pytest.raises(BadInput, match=words) as caught:
        NodeSettings().name()
    assert "--name" in str(caught.value)
    assert NodeSettings(node="gpu-7").name() == "gpu-7"


def test_memory_that_is_kept_for_the_machine_is_told_to_the_plane(tmp_path: Path) -> None:
    assert host(read(tmp_path, 'memory_reserve = "3GiB"').view).reserved_bytes == 3 << 30
