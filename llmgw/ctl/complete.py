"""Completion for shells, with the names that the plane knows."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import click

#: A shell waits for the answer: better none than a late one.
_WITHIN = 1.5


def _names(ctx: click.Context, incomplete: str, path: str, listed: str, key: str) -> list[str]:
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
            return []
        with httpx.Client(base_url=plane.url, verify=verify, headers=headers, timeout=_WITHIN, trust_env=False) as http:
            rows = msgspec.json.decode(http.get(f"/api/v{API}/{path}").content, type=dict[str, object]).get(listed)
    except (LlmgwError, httpx.HTTPError, msgspec.MsgspecError):
        return []  # completion has nowhere to say what is wrong
    names = [str(row.get(key, "")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [name for name in names if name.startswith(incomplete)]


def node_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of nodes, for completion."""
    return _names(ctx, incomplete, "nodes", "nodes", "id")


def model_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of models, for completion."""
    return _names(ctx, incomplete, "models", "models", "name")


def replica_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of replicas, for completion."""
    return _names(ctx, incomplete, "replicas", "replicas", "id")


def revision_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Revisions of the model that stands before, for completion."""
    # Before the value of an option click has not told arguments apart yet.
    model = ctx.params.get("model") or next(iter(ctx.args), None)
    if not isinstance(model, str) or not model:
        return []
    return _names(ctx, incomplete, f"models/{quote(model, safe='')}/history", "revisions", "revision")


def source_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Logs that a node can show: its agent's and its shards', for completion."""
    node = ctx.params.get("node")
    if not isinstance(node, str) or not node or not all(c.isalnum() or c in "._-" for c in node):
        return []
    return _names(ctx, incomplete, f"logs/{node}?lines=0", "sources", "name")


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
