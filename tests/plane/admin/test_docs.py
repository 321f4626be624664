"""docs/api.md says what is served and nothing else; its last section is written from the values themselves.

`LLMGW_GOLDEN=write pytest tests/plane/admin/test_docs.py` writes that section anew.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import msgspec

from llmgw.plane.admin.app import app
from llmgw.wire import api, apicommon, modelapi, nodeapi, replicaapi
from tests.plane.admin.rig import served

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
HEADING = "## The objects\n"

OBJECTS = {
    name: kind
    for part in (apicommon, replicaapi, modelapi, nodeapi, api)
    for name, kind in vars(part).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == part.__name__
}


def described() -> str:
    """Every object with its fields, in the order in which they are encoded."""
    parts = []
    for name, kind in OBJECTS.items():
        own = inspect.cleandoc(kind.__doc__ or "")
        words = " ".join(own.split()) if not own.startswith(name + "(") else ""
        fields = "\n".join(
            f"| `{field.encode_name}` | {_type(kind.__annotations__[field.name])} |"
            for field in msgspec.structs.fields(kind)
        )
        parts.append(f"### {name}\n\n{words + chr(10) * 2 if words else ''}| key | value |\n| --- | --- |\n{fields}\n")
    return "\n".join(parts)


def _type(annotation: str) -> str:
    """A field's type in JSON's words."""
    text = re.sub(r"\bstr\b", "text", annotation)
    text = re.sub(r"\bfloat\b", "number", re.sub(r"\bint\b", "integer", text))
    text = re.sub(r"\bbool\b", "true or false", text)
    text = re.sub(r"tuple\[([^\[\]]*), \.\.\.\]", r"list of \1", text)
    text = re.sub(r"dict\[text, ([^\[\]]*)\]", r"object of \1", text)
    text = re.sub(r"tuple\[integer, integer\]", "list of two integers", text)
    return text.replace(" | None", " or null").replace(" | ", " or ")


def test_the_objects_are_as_documented() -> None:
    text = DOCS.read_text()
    head, heading, found = text.partition(HEADING)
    assert heading
    if os.environ.get("LLMGW_GOLDEN") == "write":
        DOCS.write_text(f"{head}{HEADING}\n{described()}")
        found = f"\n{described()}"
    assert found == f"\n{described()}"


async def test_every_route_is_documented_and_every_documented_one_is_there(tmp_path: Path) -> None:
    async with served(tmp_path) as rig:
        routes = {
            f"{method} {rule.rule.removeprefix('/api/v1')}"
            for rule in app(rig.admin).url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
            if rule.rule.startswith("/api/v1/")
        }
    documented = set(re.findall(r"^\| `((?:GET|POST|DELETE) /[^`]*)` \|", DOCS.read_text(), re.MULTILINE))
    assert documented == routes


def test_every_error_code_is_documented() -> None:
    from llmgw import errors
    from llmgw.plane.admin.auth import Unauthenticated

    text = DOCS.read_text()
    kinds: list[type[errors.LlmgwError]] = [Unauthenticated]
    kinds += [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LlmgwError)]
    for kind in kinds:
        if kind is not errors.LlmgwError:
            assert re.search(rf"^\| {kind.http_status} \|.*`{kind.code}`", text, re.MULTILINE), kind
