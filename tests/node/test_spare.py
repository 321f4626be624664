"""What an agent does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmgw.node.spare import without


def test_a_hidden_module_cannot_be_imported_inside_the_block_and_can_after_it() -> None:
    sys.modules.pop("this", None)
    with without("this"), pytest.raises(ImportError):
        import this  # noqa: F401
    assert "this" not in sys.modules


def test_a_module_that_is_there_stays() -> None:
    with without("sys"):
        import sys as again
    assert again is sys


@pytest.mark.real
def test_the_agent_loads_no_library_that_it_has_no_use_for_and_none_of_the_planes() -> None:
    script = (
        "import sys, contextlib; from llmgw.cli import node;"
        "sys.argv[1:] = ['run', '--config', '/nowhere/node.toml'];"
        "saved, sys.stderr = sys.stderr, open('/dev/null', 'w');"
        "\nwith contextlib.suppress(SystemExit): node()\n"
        "sys.stderr = saved; assert 'llmgw.node.main' in sys.modules;"
        "print([name for name in sys.modules if name.partition('.')[0] in"
        " ('rich', 'pygments', 'h2', 'anyio', 'quart', 'hypercorn', 'jinja2', 'prometheus_client')"
        " or name.startswith(('llmgw.plane', 'llmgw.ctl', 'llmgw.demo'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
