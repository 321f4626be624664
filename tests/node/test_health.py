import sys
from subprocess import PIPE

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.engines import Asking
from llmgw.node.health import Answer, Counters, Course, Dead, Line, Patience, counted, judge, served, unproved
from llmgw.node.records import Record
from llmgw.node.serve import until_unwell
from tests.engines import order
from tests.ports import free_ports

ASKING = Asking(dead_after=2, running=("r",), waiting=("w",), made=("t",))
PATIENCE = Patience(period=5, refused=3, hung=300, stalled=200)
WELL, SLOW, REFUSED, UNWELL = Answer.WELL, Answer.SLOW, Answer.REFUSED, Answer.UNWELL


def judged(
    *answers: Answer, counters: list[Counters | None] | None = None, step: float = 5.0, asking: Asking = ASKING
) -> Dead | None:
    course = Course(well_at=0.0, moved_at=0.0)
    for n, answer in enumerate(answers):
        course, dead = judge(course, answer, counters[n] if counters else None, n * step, asking, PATIENCE)
        if dead is not None:
            return dead
    return None


def code(dead: Dead | None) -> str:
    return dead.code if dead is not None else ""


def test_a_busy_engine_may_be_slow_for_minutes() -> None:
    assert judged(*[SLOW] * 59) is None
    assert code(judged(*[SLOW] * 62)) == "hung"
    assert judged(*([SLOW] * 50 + [WELL]) * 3) is None


def test_one_refusal_is_borne_and_three_in_a_row_are_death() -> None:
    assert judged(REFUSED, REFUSED, WELL, REFUSED, REFUSED) is None
    assert code(judged(WELL, REFUSED, REFUSED, REFUSED)) == "not-listening"


def test_an_engine_that_says_it_is_dead_is_believed_the_second_time() -> None:
    assert judged(UNWELL, WELL, UNWELL) is None
    assert code(judged(WELL, UNWELL, UNWELL)) == "engine-dead"


def test_requests_inside_and_no_token_for_long_is_a_stall_however_well_it_says_it_is() -> None:
    assert code(judged(*[WELL] * 50, counters=[Counters(3, 100)] * 50)) == "stalled"
    assert judged(*[WELL] * 50, counters=[Counters(0, 100)] * 50) is None
    assert judged(*[WELL] * 50, counters=[Counters(3, n) for n in range(50)]) is None


def test_an_engine_that_shows_no_counters_has_to_make_a_token_now_and_then() -> None:
    assert code(judged(*[WELL] * 50)) == "stalled"
    assert judged(*[WELL] * 50, counters=[None, *[Counters(3, n) for n in range(49)]]) is None
    assert judged(*[WELL] * 50, asking=attrs.evolve(ASKING, made=())) is None  # it has none to show
    assert judged(*[WELL] * 50, asking=attrs.evolve(ASKING, token=False)) is None  # it makes no tokens


@given(st.lists(st.sampled_from(list(Answer)), max_size=80))
def test_a_dead_verdict_never_follows_a_good_answer_of_an_idle_engine(answers: list[Answer]) -> None:
    course = Course(well_at=0.0, moved_at=0.0)
    for n, answer in enumerate(answers):
        course, dead = judge(course, answer, STILL, n * 5.0, ASKING, PATIENCE)
        assert dead is None or answer is not WELL
        if dead is not None:
            return


METRICS = """# HELP r requests
r{model="a b",x="}"} 2
r{model="c"} 1.5
w 4
t_created 9
t{model="a"} 1e3
"""


STILL, MOVED = Counters(0, 10), Counters(0, 11)


@pytest.mark.parametrize(
    ("answer", "took", "before", "after", "failed", "dead"),
    [
        (WELL, 0.1, STILL, MOVED, 0, False),
        (UNWELL, 0.1, STILL, STILL, 1, False),  # once may be chance
        (UNWELL, 0.1, STILL, STILL, 2, True),
        (REFUSED, 0.1, None, None, 2, True),
        (SLOW, 120.0, STILL, STILL, 1, True),  # its deadline is above what load explains
        (SLOW, 120.0, None, None, 1, True),
        (SLOW, 120.0, STILL, MOVED, 5, False),  # it makes tokens for others
        (SLOW, 0.1, STILL, STILL, 1, False),  # it hung up: if it dies of that, its end says why
        (SLOW, 0.1, STILL, STILL, 2, True),
    ],
)
def test_a_leader_that_makes_no_tokens_is_dead_however_well_it_says_it_is(
    answer: Answer, took: float, before: Counters | None, after: Counters | None, failed: int, dead: bool
) -> None:
    found = unproved(answer, took, before, after, failed, 120.0)
    assert (found is not None) is dead
    assert code(found) == "token-failed" if found is not None else True


def test_counters_are_summed_over_their_labels() -> None:
    assert counted(METRICS, ASKING) == Counters(7.5, 1000.0)
    assert counted("r 1\n", ASKING) is None
    assert counted("r NaN\nt 1\n", ASKING) is None


@given(st.text(max_size=300))
def test_any_text_may_stand_where_metrics_should(text: str) -> None:
    counted(text, attrs.evolve(ASKING))


def test_only_a_list_of_models_is_read_as_one() -> None:
    assert list(served({"data": [{"id": "a"}, {}, 3]})) == ["a"]
    assert list(served([1])) == list(served({"data": 3})) == []


ANSWERS = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        code = {"/health": 200, "/sick": 503, "/v1/models": 200, "/slow": 200}.get(self.path, 404)
        if self.path == "/slow":
            time.sleep(1000)
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(code); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.send_response(501); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listens", flush=True)
server.serve_forever()
"""


@pytest.mark.real
async def test_each_kind_of_answer_over_real_http_has_its_word() -> None:
    (port,) = free_ports(1)
    process = await trio.lowlevel.open_process([sys.executable, "-c", ANSWERS, str(port)], stdout=PIPE)
    assert process.stdout is not None
    async with process.stdout:
        assert await process.stdout.receive_some()
        words = {}
        for path, timeout in (("/health", 60.0), ("/sick", 60.0), ("/slow", 0.5)):
            async with Line(Asking(health=path, timeout=timeout), "127.0.0.1", port) as line:
                words[path] = await line.ask()
        async with Line(Asking(timeout=60.0), "127.0.0.1", port) as line:
            assert await line.serves("m") == (Answer.WELL, ("m",))
            assert await line.serves("other") == (Answer.UNWELL, ("m",))
            assert await line.token("m", 60) is Answer.WELL  # 501: a model that only embeds is not ill
            process.kill()
            await process.wait()
            words["gone"] = await line.ask()
    assert words == {"/health": WELL, "/sick": UNWELL, "/slow": SLOW, "gone": REFUSED}


def order_record() -> Record:
    asked = order()
    return Record(shard=asked.shard, replica=asked.replica, model=asked.model, generation=1, token="-", spec=asked.spec)


WORKS = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, code, seconds):
        time.sleep(seconds)
        self.send_response(code); self.send_header("Content-Length", "0"); self.end_headers()
    def do_GET(self):
        self.answer(200, float(sys.argv[1])) if self.path == "/health" else self.answer(404, 0)
    def do_POST(self):
        self.answer(200, float(sys.argv[2]))
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("health", "token", "patience", "dead", "watched"),
    [
        pytest.param(
            0.0, 60.0, Patience(period=0.05, stalled=0.5), "stalled", 60, id="its API answers and no token comes"
        ),
        pytest.param(0.0, 0.0, Patience(period=0.05, stalled=4.0), "", 9, id="tokens come and no counters"),
        pytest.param(0.6, 0.0, Patience(period=0.05, hung=1.0, token=60.0), "", 4, id="health waits behind the load"),
        pytest.param(60.0, 0.0, Patience(period=0.05, hung=0.5, token=1.0), "hung", 60, id="nothing comes at all"),
    ],
)
async def test_an_engine_is_given_up_only_after_a_last_question(
    health: float, token: float, patience: Patience, dead: str, watched: float
) -> None:
    argv = [sys.executable, "-c", WORKS, str(health), str(token)]
    process = await trio.lowlevel.open_process(argv, stdout=PIPE)
    assert process.stdout is not None
    found: Dead | None = None
    try:
        async with process.stdout:
            port = int(await process.stdout.receive_some())
            async with Line(attrs.evolve(ASKING, timeout=0.2), "127.0.0.1", port) as line:
                with trio.move_on_after(watched):
                    found = await until_unwell(order_record(), line, patience, lambda words: None)
    finally:
        process.kill()
        await process.wait()
    assert code(found) == dead
