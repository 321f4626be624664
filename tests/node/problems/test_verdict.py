"""All rules together, and the page that lists what they can say."""

from __future__ import annotations

import ast
from pathlib import Path

from llmgw.node import problems
from llmgw.node.problems.memory import Facts, Memory
from llmgw.node.problems.verdict import now_wrong
from llmgw.node.problems.verdict import problems as judge

#: Where a rule's call has its code.
CODES_AT = {"_bad": 1, "_symptom": 1, "node": 0}


def codes() -> set[str]:
    """Every code that is written in the rules."""
    found = set()
    for file in Path(problems.__file__).parent.glob("*.py"):
        for each in ast.walk(ast.parse(file.read_text())):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in CODES_AT:
                code = each.args[CODES_AT[each.func.id]]
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    found.add(code.value)
    return found


def test_every_code_is_in_the_handbook() -> None:
    page = (Path(__file__).parents[3] / "docs/health.md").read_text()
    found = codes()
    assert len(found) > 40
    assert sorted(code for code in found if f"`{code}`" not in page) == []


def test_nothing_seen_is_nothing_wrong() -> None:
    assert judge(Facts(), Memory(), 0.0).problems == ()
    assert now_wrong(Facts(), Memory(), 0.0) == []
