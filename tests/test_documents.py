"""The documents say what is true of the code, where a test can tell: links lead somewhere, every setting is named."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from llmgw.config import LogSettings, PackageSettings
from llmgw.node.settings import EngineSettings, InstallSettings, NodeSettings, RunLogs
from llmgw.plane.settings import Gateway, PlaneSettings
from llmgw.plane.world import Settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATING = (ROOT / "docs" / "operating.md").read_text()


def anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = document.parent / path if path else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


@pytest.mark.parametrize(
    "settings",
    [
        PlaneSettings,
        Settings,
        Gateway,
        LogSettings,
        NodeSettings,
        RunLogs,
        EngineSettings,
        InstallSettings,
        PackageSettings,
    ],
)
def test_every_setting_is_in_the_handbook(settings: type[attrs.AttrsInstance]) -> None:
    for field in attrs.fields(settings):
        named = (f"`{field.name}`", f"`[{field.name}]`", f"`[[{field.name}]]`", f"`[{field.name}.NAME]`")
        assert any(name in OPERATING for name in named) or field.name in ("judgement", "gateway"), field.name


@pytest.mark.parametrize("script", ["demo", "test", "bench"])
def test_scripts_that_the_readme_names_are_there(script: str) -> None:
    assert f"scripts/{script}" in (ROOT / "README.md").read_text()
    assert (ROOT / "scripts" / script).stat().st_mode & 0o111
