"""What is stored, between releases: a record that gained a field is protected by the schema's number (decision 50)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.upgrade.releases import PRESENT, Release, releases

pytestmark = pytest.mark.real

#: Run by the code of a release: the schema that it knows, and the fields of everything that its plane stores as JSON.
TELL = """
import json, sys
import msgspec
from msgspec import inspect as t
from llmgw.plane import certs, event, tokens
from llmgw.plane.fabrics import kept
from llmgw.plane.store import records
from llmgw.plane.store.sqlite import schemas
from llmgw.plane.world import Model
from llmgw.rdma.results import PairResult

roots = [Model, records.NodeRecord, records.ShardRecord, certs.Certificate, tokens.Token, event.Event, kept.Scan]
roots.append(PairResult)
found, left = {}, [t.type_info(root) for root in roots]
while left:
    info = left.pop()
    if isinstance(info, t.StructType):
        if info.cls.__name__ in found:
            continue
        found[info.cls.__name__] = {f.encode_name: f.required for f in info.fields}
        left += [f.type for f in info.fields]
    for name in ("item_type", "key_type", "value_type"):
        if isinstance(inner := getattr(info, name, None), t.Type):
            left.append(inner)
    left += getattr(info, "types", ())
    left += getattr(info, "item_types", ())
print(json.dumps({"schema": len(schemas()), "records": found}))
"""


def told(release: Release) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", TELL], env=os.environ | release.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_a_record_with_more_fields_has_a_schema_of_its_own(release: Release) -> None:
    """Else that release would open the state, lose what it does not know, and write the record back without it."""
    before, now = told(release), told(PRESENT)
    more = {
        f"{name}.{field}"
        for name, fields in now["records"].items()
        for field in fields
        if name in before["records"] and field not in before["records"][name]
    }
    assert now["schema"] > before["schema"] or not more, f"add a step under store/schema: {sorted(more)}"


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_what_a_release_has_stored_can_be_read(release: Release) -> None:
    before, now = told(release), told(PRESENT)
    for name, fields in now["records"].items():
        old = before["records"].get(name, fields)
        assert set(old) <= set(fields), f"{name}: what is stored may not lose a field"
        assert not [field for field, required in fields.items() if required and field not in old], (
            f"{name}: a new field needs a default"
        )
