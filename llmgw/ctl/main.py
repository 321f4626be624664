"""`llmgw ctl`: what an operator types. Commands are light to import; what they need comes in when they run."""

from __future__ import annotations

import click

from llmgw.ctl import (
    complete,
    doctor,
    engines,
    events,
    fabrics,
    fabrictest,
    fleet,
    identity,
    logs,
    models,
    node,
    weights,
    whatif,
)
from llmgw.ctl.naming import Ctl

_STATUS = """\b
Exit status:
  0    done
  1    an error of another kind
  2    bad input: an option, a file, a name that cannot be one
  3    nothing has that name
  4    it does not fit what is (a name taken, a node still connected)
  5    refused: wrong token, wrong certificate, an agent too old
  6    unavailable: plane or agent cannot be reached now
  7    no answer in time
  8    the node did it, and it failed there
  130  Ctrl-C
`doctor` has its own: 0 all passed, 1 warnings, 2 failures.
"""


@click.group(cls=Ctl, name="ctl", epilog=_STATUS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--plane", metavar="URL", help="The plane's admin address, https://HOST:PORT. [LLMGW_PLANE]")
@click.option(
    "--token-file", metavar="FILE", type=click.Path(), help="An administrator's token. [LLMGW_TOKEN_FILE, LLMGW_TOKEN]"
)
@click.option(
    "--cert", metavar="FILE", type=click.Path(), help="An administrator's key and certificate (PEM). [LLMGW_CERT]"
)
@click.option("--ca", metavar="FILE", type=click.Path(), help="The plane's CA certificate (PEM). [LLMGW_CA]")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="A plane's directory on this machine: address, CA and token.",
)
def ctl(plane: str | None, token_file: str | None, cert: str | None, ca: str | None, directory: str | None) -> None:
    """Ask and steer a plane.

    What is not given here or in the environment comes from ~/.config/llmgw/ctl.toml (plane, ca, token_file or
    cert), and on the plane's own machine from /var/lib/llmgw-plane.
    """


for _part in (
    fleet,
    models,
    node,
    logs,
    events,
    identity,
    doctor,
    fabrictest,
    fabrics,
    weights,
    engines,
    whatif,
    complete,
):
    for _command in _part.COMMANDS:
        ctl.add_command(_command)
