"""Completion for shells, with the names that the plane knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import click

#: A shell waits for the answer: better none than a late one.
_WITHIN = 1.5


def _asked(ctx: click.Context, path: str) -> dict[str, Any]:
    """What the plane answers; nothing where it does not: completion has nowhere to say what is wrong."""
    import httpx
    import msgspec

    from llmgw.ctl.running import target
    from llmgw.errors import LlmgwError
    from llmgw.tls import client_context
    from llmgw.wire.apicommon import API

    try:
        plane = target(ctx)
        verify = client_context(plane.ca, plane.cert) if plane.ca is not None else False
        headers = {"Authorization": f"Bearer {plane.token}"} if plane.token else {}
        if plane.url.startswith("https://") and verify is False:
            return {}
        with httpx.Client(base_url=plane.url, verify=verify, headers=headers, timeout=_WITHIN, trust_env=False) as http:
            return msgspec.json.decode(http.get(f"/api/v{API}/{path}").content, type=dict[str, Any])
    except (LlmgwError, httpx.HTTPError, msgspec.MsgspecError):
        return {}


def _names(ctx: click.Context, incomplete: str, path: str, listed: str, key: str) -> list[str]:
    rows = _asked(ctx, path).get(listed, [])
    return _fitting(incomplete, (row.get(key, "") for row in rows if isinstance(row, dict)))


def _fitting(incomplete: str, names: Iterable[object]) -> list[str]:
    return [name for name in dict.fromkeys(map(str, names)) if name.startswith(incomplete)]


def _before(ctx: click.Context, name: str, place: int = 0) -> str:
    """An argument that stands before, as one part of an address; "" when there is none that could be one."""
    # Before the value of an option click has not told arguments apart yet.
    given = ctx.args[place] if len(ctx.args) > place else ctx.params.get(name)
    return quote(given, safe="") if isinstance(given, str) and given not in (".", "..") else ""


def node_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of nodes, for completion."""
    return _names(ctx, incomplete, "nodes", "nodes", "id")


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of models, for completion."""
    return _names(ctx, incomplete, "models", "models", "name")


def replica_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of replicas, for completion."""
    return _names(ctx, incomplete, "replicas", "replicas", "id")


def fabric_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of fabrics, for completion."""
    return _names(ctx, incomplete, "fabrics", "fabrics", "name")


def node_or_fabric_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of nodes and of fabrics, for completion."""
    return [*node_names(ctx, param, incomplete), *fabric_names(ctx, param, incomplete)]


def token_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of tokens that can be revoked, for completion."""
    rows = _asked(ctx, "tokens").get("tokens", [])
    return _fitting(incomplete, (row["id"] for row in rows if row.get("state") == "open"))


def revision_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Revisions of the model that stands before, for completion."""
    model = _before(ctx, "model")
    return _names(ctx, incomplete, f"models/{model}/history", "revisions", "revision") if model else []


def source_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Logs that a node can show: its agent's and its shards', for completion."""
    node = _before(ctx, "node")
    return _names(ctx, incomplete, f"logs/{node}?lines=0", "sources", "name") if node else []


def run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Runs of the log that stands before, for completion."""
    node, source = _before(ctx, "node"), _before(ctx, "source", 1)
    rows = _asked(ctx, f"logs/{node}?lines=0").get("sources", []) if node else []
    return _fitting(incomplete, (run for row in rows if quote(row["name"], safe="") == source for run in row["runs"]))


def problem_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Subjects of a node's problems, and codes of the subject that stands before, for completion."""
    node, subject = _before(ctx, "name"), ctx.params.get("subject")
    rows = _asked(ctx, f"nodes/{node}").get("problems", []) if node else []
    return _fitting(incomplete, (row[param.name] for row in rows if subject in (None, row["subject"])))


def weights_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Sources of which a cache has something, for completion."""
    nodes = _asked(ctx, "weights").get("nodes", [])
    return _fitting(incomplete, (row["source"] for node in nodes for row in node["weights"]))


Completer = Callable[[click.Context, click.Parameter, str], list[str]]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(llmgw ctl completion bash)"                   in ~/.bashrc
    zsh:   eval "$(llmgw ctl completion zsh)"                    in ~/.zshrc
    fish:  llmgw ctl completion fish > ~/.config/fish/completions/llmgw.fish
    """
    from click.shell_completion import get_completion_class

    root = ctx.find_root()
    name = root.info_name or "llmgw"
    maker = get_completion_class(shell)
    assert maker is not None
    script = maker(root.command, {}, name, f"_{name.replace('-', '_').upper()}_COMPLETE")
    # Not `source()`: it starts bash to ask for its version, which is of no matter to a script that is only printed.
    click.echo(script.source_template % script.source_vars())


COMMANDS = (completion,)
