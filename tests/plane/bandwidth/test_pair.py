from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from llmgw.errors import AgentGone, Conflict, Failed
from llmgw.plane.bandwidth.pair import LISTEN_WITHIN, SERVER_GRACE, Runner
from llmgw.plane.bandwidth.plan import plan
from llmgw.rdma.command import shared
from llmgw.rdma.link import Refusal
from llmgw.rdma.results import Line, Note, PairResult, Parameters, Planned, RailResult
from llmgw.wire.agent import Listening
from llmgw.wire.control import BandwidthClient, BandwidthReply, BandwidthServe, PerftestReply
from llmgw.wire.facts import Gpu, Port
from tests.plane.bandwidth.lab import GOOD, UP, Lab, node, world
from tests.rdma.ports import roce

Heard = Callable[[Listening], None] | None
WORLD = world(node("a", 1), node("b", 2))
PLAIN = Parameters(seconds=10)


async def run(lab: Lab, parameters: Parameters = PLAIN, said: list[Line] | None = None) -> PairResult:
    lines = said if said is not None else []
    return await Runner(lab, lambda: 1000.0).pair(plan(WORLD, "a", "b", parameters), lines.append)


async def test_rails_are_tested_one_by_one_with_b_serving_and_a_as_the_client(autojump_clock: MockClock) -> None:
    lab, said = Lab(), list[Line]()
    result = await run(lab, said=said)
    assert [(rail.rail, rail.gbps, rail.verdict.grade) for rail in result.rails] == [
        ("0", GOOD, "good"),
        ("1", GOOD, "good"),
    ]
    assert lab.most_running == 2
    assert {node for node, request in lab.asked if isinstance(request, BandwidthServe)} == {"b"}
    assert {node for node, request in lab.asked if isinstance(request, BandwidthClient)} == {"a"}
    assert [type(line) for line in said] == [Planned, RailResult, RailResult]
    assert (result.clock, result.grade, lab.running) == (1000.0, "good", set())
    assert result.nccl_ib_hca == {"a": "=mlx5_0:1,mlx5_1:1", "b": "=mlx5_0:1,mlx5_1:1"}


async def test_both_sides_get_the_same_parameters_and_their_own_device_and_index(autojump_clock: MockClock) -> None:
    lab = Lab()
    await run(lab, replace(PLAIN, rails=("1",), bidirectional=True))
    serve = next(request for _, request in lab.asked if isinstance(request, BandwidthServe))
    client = next(request for _, request in lab.asked if isinstance(request, BandwidthClient))
    assert serve.run == replace(client.run, gid_index=serve.run.gid_index, device=serve.run.device)
    assert (client.run.device, client.run.gid_index, client.run.mtu) == ("mlx5_1", 3, 4096)
    assert client.run.tcp_port == serve.run.tcp_port >= 18515
    assert client.server == "b.example" or client.server.startswith("192.168.0.")
    assert shared(("ib_write_bw", "-b"))  # the flags themselves are compared in tests/rdma/test_command.py


async def test_all_rails_at_once_add_up(autojump_clock: MockClock) -> None:
    lab = Lab()
    result = await run(lab, replace(PLAIN, at_once=True))
    assert result.total_gbps == 2 * GOOD
    assert result.seconds < 2 * 10


async def test_the_client_waits_for_the_servers_socket(autojump_clock: MockClock) -> None:
    lab = Lab(silent_servers=True)
    began = trio.current_time()
    result = await run(lab, replace(PLAIN, rails=("0",)))
    assert trio.current_time() - began == pytest.approx(LISTEN_WITHIN, abs=1)
    failure = result.rails[0].failure
    assert failure is not None
    assert (failure.side, failure.code) == ("b", "not-listening")
    assert not any(isinstance(request, BandwidthClient) for _, request in lab.asked)
    assert lab.running == set()


async def test_cancelling_ends_both_sides(autojump_clock: MockClock) -> None:
    lab = Lab()
    with trio.move_on_after(5):
        await run(lab)
    assert lab.running == set()


async def test_a_server_that_fails_early_means_that_no_client_starts(autojump_clock: MockClock) -> None:
    def spoil(node: str, role: str, reply: BandwidthReply) -> BandwidthReply:
        return reply

    class NoDevice(Lab):
        async def _serve(self, node: str, port: int, listening: Heard) -> BandwidthReply:
            return BandwidthReply(
                exit_code=1,
                error="exit code 1",
                cause="no such RDMA device",
                cause_code="no-device",
                lines=("IB device x",),
            )

    lab = NoDevice(spoil=spoil)
    result = await run(lab, replace(PLAIN, rails=("0",)))
    failure = result.rails[0].failure
    assert failure is not None
    assert (failure.side, failure.code) == ("b", "no-device")
    assert result.rails[0].b.lines == ("IB device x",)
    assert result.rails[0].gbps is None
    assert not any(isinstance(request, BandwidthClient) for _, request in lab.asked)


async def test_a_failed_client_does_not_leave_its_server_running(autojump_clock: MockClock) -> None:
    class Mute(Lab):
        async def _client(self, node: str, port: int, device: str, seconds: int) -> BandwidthReply:
            return BandwidthReply(exit_code=1, error="exit code 1", cause="not enough memory", cause_code="memory-lock")

    lab = Mute()
    began = trio.current_time()
    result = await run(lab, replace(PLAIN, rails=("0",)))
    assert trio.current_time() - began == pytest.approx(0.5 + SERVER_GRACE, abs=0.1)
    failure = result.rails[0].failure
    assert failure is not None
    assert (failure.side, failure.code) == ("a", "memory-lock")
    assert "stopped" in result.rails[0].b.error
    assert lab.running == set()


async def test_a_node_that_is_lost_ends_the_rail_at_once_and_is_named(autojump_clock: MockClock) -> None:
    lab = Lab()

    async def lose() -> None:
        await trio.sleep(3)
        lab.lost["b"].set()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        result = await run(lab, replace(PLAIN, rails=("0",)))
    assert trio.current_time() - began < 4
    failure = result.rails[0].failure
    assert failure is not None
    assert (failure.side, failure.code) == ("b", "agent-gone")
    assert lab.running == set()


async def test_a_port_that_was_taken_meanwhile_is_chosen_anew(autojump_clock: MockClock) -> None:
    class Race(Lab):
        races: int = 0

        async def _serve(self, node: str, port: int, listening: Heard) -> BandwidthReply:
            if self.races < 1:
                self.races += 1
                return BandwidthReply(exit_code=1, error="exit code 1", cause="taken", cause_code="port-in-use")
            return await super()._serve(node, port, listening)

    result = await run(Race(), replace(PLAIN, rails=("0",)))
    assert result.rails[0].gbps == GOOD


async def test_a_link_that_cannot_work_is_a_result_and_the_other_rail_is_tested(autojump_clock: MockClock) -> None:
    down = replace(node("b", 2).ports[0], state="DOWN", physical_state="Polling")
    made = world(node("a", 1), node("b", 2, ports=(down, node("b", 2).ports[1])))
    result = await Runner(Lab()).pair(plan(made, "a", "b", PLAIN), lambda line: None)
    first, second = result.rails
    assert first.failure is not None
    assert first.failure.code == "port-polling"
    assert "b mlx5_0/1" in first.failure.error
    assert second.gbps == GOOD
    assert (result.grade, result.share) == ("failed", 0.0)


async def test_versions_that_do_not_talk_are_refused_before_the_run(autojump_clock: MockClock) -> None:
    lab = Lab(tools={"a": PerftestReply(version="5.60"), "b": PerftestReply(version="6.06")})
    with pytest.raises(Conflict, match=r"5\.70"):
        await run(lab)
    assert not any(isinstance(request, BandwidthServe) for _, request in lab.asked)


async def test_a_node_without_perftest_is_named_with_its_remedy(autojump_clock: MockClock) -> None:
    lab = Lab(tools={"b": PerftestReply(error="perftest is not installed; install it by hand")})
    with pytest.raises(Failed, match="b: perftest is not installed; install it by hand"):
        await run(lab)


async def test_an_installation_is_told(autojump_clock: MockClock) -> None:
    said: list[Line] = []
    lab = Lab(tools={"b": PerftestReply(version="6.06", installed_now=True)})
    result = await run(lab, said=said)
    assert result.installed == ("b",)
    assert Note(text="perftest 6.06 was installed on b") in said


async def test_gpu_memory_needs_a_perftest_that_can(autojump_clock: MockClock) -> None:
    ports = (roce("mlx5_0", "10.0.0.1", nearest_gpus=("GPU-1",)),)
    other = (roce("mlx5_0", "10.0.0.2", nearest_gpus=("GPU-2",)),)
    made = world(node("a", 1, ports=ports), node("b", 2, ports=other))
    with pytest.raises(Conflict, match="cannot use GPU memory"):
        await Runner(Lab()).pair(plan(made, "a", "b", replace(PLAIN, gpu=True)), lambda line: None)
    able = PerftestReply(version="6.28", cuda=True)
    lab = Lab(tools={"a": able, "b": able})
    await Runner(lab).pair(plan(made, "a", "b", replace(PLAIN, gpu=True)), lambda line: None)
    assert [r.run.gpu for _, r in lab.asked if isinstance(r, BandwidthServe | BandwidthClient)] == ["GPU-2", "GPU-1"]


async def test_rails_of_one_adapter_that_are_tested_at_once_are_graded_by_their_share_of_the_slot(
    autojump_clock: MockClock,
) -> None:
    def twins(number: int) -> tuple[Port, ...]:
        slot = {"pcie_gen": 3, "pcie_width": 16}
        return tuple(
            roce(f"mlx5_{rail}", f"10.{rail}.0.{number}", rate_gbps=100.0, pci=f"0000:0a:00.{rail}", **slot)
            for rail in range(2)
        )

    made = world(node("a", 1, ports=twins(1)), node("b", 2, ports=twins(2)))
    lab = Lab(speed=lambda a, b, device: 55.0)
    together = await Runner(lab).pair(plan(made, "a", "b", replace(PLAIN, at_once=True)), lambda line: None)
    assert [(rail.verdict.grade, rail.verdict.limit) for rail in together.rails] == [("good", "pcie")] * 2
    alone = await Runner(lab).pair(plan(made, "a", "b", PLAIN), lambda line: None)
    assert [(rail.verdict.grade, rail.verdict.limit) for rail in alone.rails] == [("bad", "link")] * 2


async def test_a_gpu_that_cannot_be_read_is_not_tested_with(autojump_clock: MockClock) -> None:
    gpus = (Gpu(uuid="GPU-1", unreadable="lost"), Gpu(uuid="GPU-2"))
    near = (roce("mlx5_0", "10.0.0.1", nearest_gpus=("GPU-1", "GPU-2")),)
    made = world(replace(node("a", 1, ports=near), gpus=gpus), replace(node("b", 2, rails=1), gpus=gpus[:1]))
    rail = plan(made, "a", "b", replace(PLAIN, gpu=True)).rails[0]
    assert isinstance(rail.link, Refusal)
    assert rail.link.reason == "b has no GPU to test with"
    made = world(replace(node("a", 1, ports=near), gpus=gpus), replace(node("b", 2, rails=1), gpus=gpus))
    assert plan(made, "a", "b", replace(PLAIN, gpu=True)).rails[0].gpus == ("GPU-2", "GPU-2")


async def test_latency_is_measured_and_not_graded(autojump_clock: MockClock) -> None:
    lab = Lab(spoil=lambda node, role, reply: replace(reply, average_gbps=None, latency_us=2.5))
    result = await run(lab, replace(PLAIN, test="ib_write_lat", rails=("0",)))
    assert (result.rails[0].latency_us, result.rails[0].gbps, result.grade) == (2.5, None, "measured")
    asked = next(request.run for _, request in lab.asked if isinstance(request, BandwidthClient))
    assert (asked.test, asked.size) == ("ib_write_lat", 2)


async def test_what_ran_meanwhile_and_errors_that_grew_are_shown(autojump_clock: MockClock) -> None:
    def spoil(node: str, role: str, reply: BandwidthReply) -> BandwidthReply:
        return replace(reply, busy=("tiny-0-0",), counters={"symbol_error": 3}) if node == "b" else reply

    result = await run(Lab(spoil=spoil), replace(PLAIN, rails=("0",)))
    assert result.busy == ("tiny-0-0",)
    assert any("b mlx5_0/1: symbol_error grew by 3" in words for words in result.rails[0].verdict.why)


async def test_a_cable_that_is_pulled_in_the_middle_is_no_low_figure(autojump_clock: MockClock) -> None:
    def spoil(node: str, role: str, reply: BandwidthReply) -> BandwidthReply:
        return replace(reply, average_gbps=0.3, state_after="DOWN Polling" if node == "b" else UP)

    result = await run(Lab(spoil=spoil), replace(PLAIN, rails=("0",)))
    failure = result.rails[0].failure
    assert failure is not None
    assert (failure.side, failure.code, result.rails[0].gbps) == ("b", "link-died", None)


async def test_an_agent_that_is_not_there_is_an_error_before_anything_starts(autojump_clock: MockClock) -> None:
    lab = Lab(lost={"b": trio.Event()})
    lab.lost["b"].set()
    with pytest.raises(AgentGone):
        await run(lab)
    assert attrs.asdict(lab)["running"] == set()
