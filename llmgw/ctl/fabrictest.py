"""Can these nodes really reach each other, and if not, which wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names
from llmgw.ctl.naming import segment
from llmgw.ctl.running import output, pretty, run

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane
    from llmgw.rdma.results import Line, Parameters

#: The plane says something at least every five seconds while a test runs.
_SILENT = 45.0
#: Exit status by the worst grade.
_STATUS = {"good": 0, "measured": 0, "suspicious": 1, "fair": 1, "bad": 2, "failed": 2}


def _bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from llmgw.units import parse_size

    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    from llmgw.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _share(kind: float, words: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    name = f"--{words}"
    return click.option(
        name, default=kind, show_default=True, metavar="SHARE", type=click.FloatRange(0, 1.5, min_open=True),
        help=f"The share of the ceiling from which a rail is {words}.",
    )  # fmt: skip


@click.command("fabric-test")
@click.argument("nodes", nargs=-1, metavar="[A B | --all [NODE...]]", shell_complete=node_names)
@click.option("--all", "everybody", is_flag=True, help="Every pair of the fleet, or of the nodes given.")
@click.option(
    "--nodes", "listed", default="", metavar="A,B,...", help="With --all: only these, as the arguments say too."
)
@click.option("--search", is_flag=True, help="Not every pair: only as many rounds as finding the bad part takes.")
@click.option("--resume", is_flag=True, help="Go on with a test of the fleet that was cut short.")
@click.option("--fabric", default="", metavar="LABEL", help="With --all: only nodes with a port on this fabric.")
@click.option("--history", is_flag=True, help="Stored results of the pair, or the newest of all pairs.")
@click.option("--seconds", default=10, show_default=True, type=click.IntRange(1, 86_400), help="Length of each test.")
@click.option("--size", default="1MiB", show_default=True, metavar="SIZE", callback=_bytes, help="Bytes of a message.")
@click.option("--queue-pairs", default=2, show_default=True, type=click.IntRange(1, 1024), help="Queue pairs.")
@click.option("--rail", "rails", multiple=True, metavar="RAIL", help="Only this rail, by name or device; repeatable.")
@click.option("--all-rails-at-once", "at_once", is_flag=True, help="Rails together: shows what they share.")
@click.option("--bidirectional", is_flag=True, help="Both directions at the same time.")
@click.option("--latency", is_flag=True, help="Latency (ib_write_lat) instead of bandwidth.")
@click.option("--gpu", is_flag=True, help="From GPU memory to GPU memory (GPUDirect).")
@click.option("--routed", is_flag=True, help="The fabric routes between RoCE subnets.")
@click.option("--force", is_flag=True, help="Also where models are served.")
@click.option("--when-idle", callback=_duration, metavar="TIME", help="Wait so long for a moment without requests.")
@_share(0.95, "good")
@_share(0.90, "fair")
@click.option("--perftest-option", "extra", multiple=True, metavar="OPT", help="For both sides, such as --tclass=96.")
@output
def fabric_test(
    nodes: tuple[str, ...],
    everybody: bool,
    listed: str,
    search: bool,
    resume: bool,
    fabric: str,
    history: bool,
    seconds: int,
    size: int,
    queue_pairs: int,
    rails: tuple[str, ...],
    at_once: bool,
    bidirectional: bool,
    latency: bool,
    gpu: bool,
    routed: bool,
    force: bool,
    when_idle: float | None,
    good: float,
    fair: float,
    extra: tuple[str, ...],
    output: str,
) -> None:
    """Measure RDMA bandwidth between two nodes, rail by rail, or over the whole fleet.

    A is the client, B the server; rails are paired as NCCL pairs them. Every figure is graded against what the
    link, its MTU and PCIe can carry. Ctrl-C ends the processes on both nodes.

    \b
    llmgw ctl fabric-test gpu-01 gpu-02
    llmgw ctl fabric-test --all --search
    llmgw ctl fabric-test --history gpu-01 gpu-02

    Exit status 0 when all is good, 1 for fair or suspicious, 2 for bad or failed.
    """
    from llmgw.rdma.results import Parameters

    nodes = (*nodes, *filter(None, (name.strip() for name in listed.split(","))))
    whole = everybody or search or resume or bool(fabric)
    if history:
        _history(nodes, output)
    if not whole and len(nodes) != 2:
        raise click.UsageError("name two nodes, or use --all")
    if whole and when_idle is not None:
        raise click.UsageError("--when-idle is for two nodes: a test of the fleet leaves out nodes that serve")
    parameters = Parameters(
        test="ib_write_lat" if latency else "ib_write_bw",
        size=size,
        queue_pairs=queue_pairs,
        seconds=seconds,
        bidirectional=bidirectional,
        at_once=at_once,
        gpu=gpu,
        routed=routed,
        extra=tuple(word for option in extra for word in option.split()),
        rails=rails,
        good=good,
        fair=fair,
    )
    if whole:
        _fleet(nodes, fabric, parameters, force, resume, search, output)
    _pair(nodes, parameters, force, when_idle, output)


def _pair(nodes: tuple[str, ...], parameters: Parameters, force: bool, when_idle: float | None, output: str) -> None:
    a, b = nodes
    order = {"a": a, "b": b, "parameters": parameters, "force": force, "when_idle": when_idle}

    async def act(plane: Plane) -> int:
        import msgspec

        from llmgw.ctl.fabrictables import PairView
        from llmgw.rdma.results import PairResult

        view = PairView(quiet=output == "json")
        status = 2
        async with plane.lines("fabric-test", order, silent_after=_SILENT) as lines:
            with view:
                async for data in lines:
                    line = _read(data)
                    view.take(line)
                    if isinstance(line, PairResult):
                        status = _STATUS.get(line.grade, 2)
                        if output == "json":
                            pretty(msgspec.json.encode(line))
        return status

    run(act, output=output)


def _fleet(
    nodes: tuple[str, ...], fabric: str, parameters: Parameters, force: bool, resume: bool, search: bool, output: str
) -> None:
    order = {
        "nodes": nodes, "fabric": fabric, "parameters": parameters, "force": force, "resume": resume, "search": search,
    }  # fmt: skip

    async def act(plane: Plane) -> int:
        from llmgw.ctl.fabrictables import FleetView
        from llmgw.rdma.results import FleetResult, PairResult

        view = FleetView(quiet=output == "json")
        worst = 0
        async with plane.lines("fabric-test/all", order, silent_after=_SILENT) as lines:
            with view:
                async for data in lines:
                    line = _read(data)
                    view.take(line)
                    if isinstance(line, PairResult):
                        worst = max(worst, _STATUS.get(line.grade, 2))
                    if output == "json" and isinstance(line, PairResult | FleetResult):
                        click.echo(data)
        return worst

    run(act, output=output)


def _history(nodes: tuple[str, ...], output: str) -> None:
    if len(nodes) not in (0, 2):
        raise click.UsageError("name two nodes, or none for the newest result of every pair")
    path = "/".join(["fabric-test", *(segment(node) for node in nodes)])

    async def act(plane: Plane) -> None:
        from llmgw.ctl import fabrictables
        from llmgw.ctl.show import console
        from llmgw.rdma.results import History

        answer = await plane.get(path)
        if output == "json":
            pretty(answer.data)
            return
        out = console()
        results = answer.read(History).results
        shown = fabrictables.history(results, out.width) if nodes else fabrictables.matrix(results, out.width)
        out.print(shown, soft_wrap=not out.is_terminal)

    run(act, output=output)


def _read(data: bytes) -> Line:
    """One line of a running test. Raises what the plane says ended it."""
    import msgspec

    from llmgw.ctl.client import error_of
    from llmgw.errors import LlmgwError
    from llmgw.rdma.results import Ended, Line

    try:
        line = msgspec.json.decode(data, type=Line)
    except msgspec.MsgspecError as error:
        raise LlmgwError(f"the plane's answer cannot be read: {error}", remedy="are ctl and the plane alike?") from None
    if isinstance(line, Ended):
        raise error_of(line.error)
    return line


COMMANDS = (fabric_test,)
