from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma import perftest
from llmgw.rdma.perftest import Row, differ, from_json, heading, result, tables
from tests.rdma.recorded import ROCE, sides

GBITS = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
OLD = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n"
NEW = OLD.replace("MB/sec", "MiB/sec")


@pytest.mark.parametrize(
    ("recording", "gbps"),
    [
        ("bw-D10", 0.042182),
        ("bw-all-sizes", 0.033176),
        ("bw-bidir", 0.040801),
        ("bw-cpu_util", 0.051421),
        ("bw-noPeak", 0.048016),
        ("bw-q4-s4096", 0.015097),
        ("bw-n300", 2.60 * 1.048576 * 8 / 1000),
        ("send_bw", 0.033937),
        ("read_bw", 0.064646),
        ("fault-netem-loss-20pct", 0.003537),
    ],
)
def test_a_recorded_run_reads_as_its_average(recording: str, gbps: float) -> None:
    side = sides(recording)["client"]
    row = result(side.stdout, side.size)
    assert row is not None
    assert row.average_gbps == pytest.approx(gbps)


def test_every_recorded_row_of_numbers_is_read_and_nothing_else() -> None:
    """A second, dumber reading of all recordings: lines under a heading that hold five or more numbers only."""
    read = 0
    for file in sorted(ROCE.glob("*.txt")):
        for side in sides(file.stem).values():
            expected = 0
            _, _, table = side.stdout.partition("#iterations")
            for line in table.splitlines()[1:]:
                words = line.split()
                if len(words) >= 5 and all(word.replace(".", "").isdigit() for word in words):
                    expected += int(words[0]) < 1 << 31  # the garbage row of a failed server
            assert sum(map(len, tables(side.stdout))) == expected, file.name
            read += expected
    assert read > 120


@pytest.mark.parametrize(
    ("recording", "typical"), [("write_lat", 6735.15), ("send_lat", 8531.73), ("read_lat", 6978.03)]
)
def test_latency_is_the_typical_one_in_microseconds(recording: str, typical: float) -> None:
    row = result(sides(recording)["client"].stdout)
    assert row is not None
    assert (row.latency_us, row.average_gbps) == (typical, None)


def test_latency_of_a_timed_run_is_its_average() -> None:
    text = " #bytes        #iterations       t_avg[usec]    tps average\n 2  1234567  2.71  369003.69\n"
    assert result(text) == Row(2, 1234567, None, 2.71, None)


def test_mb_and_mib_both_mean_two_to_the_twentieth() -> None:
    line = " 8388608    5000             24063.11            24056.74   0.003007\n"
    for text in (OLD + line, NEW + line):
        row = result(text)
        assert row is not None
        assert row.average_gbps == pytest.approx(201.8, abs=0.05)


def test_an_extra_column_moves_nothing() -> None:
    """Mapped by name: the service level stands before the iterations (PT08)."""
    text = (
        " #bytes    #sl      #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n"
        " 65536      3        5000             10.00            9.00   0.1\n"
    )
    row = result(text)
    assert row is not None
    assert (row.size, row.iterations, row.message_rate) == (65536, 5000, 0.1)
    assert row.average_gbps == pytest.approx(9.0 * (1 << 20) * 8 / 1e9)


def test_columns_per_port_do_not_hide_the_sum() -> None:
    text = (
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]   BW Port1[Gb/sec]"
        "   MsgRate Port1[Mpps]   BW Port2[Gb/sec]   MsgRate Port2[Mpps]\n"
        " 65536 1000 0.00 390.12 0.74 195.0 0.37 195.1 0.37\n"
    )
    row = result(text)
    assert row is not None
    assert (row.average_gbps, row.message_rate) == (390.12, 0.74)


def test_foreign_lines_between_heading_and_rows_are_passed_over() -> None:
    """The CPU-frequency warning repeats before each row of a sweep (PT12); a warning may hold the size (PT08)."""
    text = (
        "WARNING: 8388608 is a large message -- see --help\n 8388608 1 2 3 4\n"
        + OLD
        + "Conflicting CPU frequency values detected: 800.000000 != 3177.500000. CPU Frequency is not max.\n"
        " 2          5000             7.91            7.77   4.073\n"
        "Conflicting CPU frequency values detected: 800.0 != 3177.5. CPU Frequency is not max.\n"
        " 8388608    5000             2758.10            2757.99   0.000345\n"
    )
    row = result(text, 8388608)
    assert row is not None
    assert row.average_gbps == pytest.approx(2757.99 * 1.048576 * 8 / 1000)


def test_a_cuda_preamble_is_no_table() -> None:
    """PT04."""
    text = (
        "Perftest doesn't supports CUDA tests with inline messages: inline size set to 0\n"
        "Listing all CUDA devices in system:\nCUDA device 0: PCIe address is 1B:00\n\n"
        "Picking device No. 0\n[pid = 1822, dev = 0] device name = [NVIDIA A100-SXM4-80GB]\n"
        "creating CUDA Ctx\nmaking it the current CUDA Ctx\n"
        "cuMemAlloc() of a 16777216 bytes GPU buffer\nallocated GPU buffer address at 00007f0 pointer=0x7f\n"
        + OLD
        + " 8388608    5000             11010.92            11002.55   0.001375\n"
    )
    row = result(text)
    assert row is not None
    assert row.average_gbps == pytest.approx(92.3, abs=0.05)


def test_client_and_server_in_one_stream_are_not_added_up() -> None:
    """PT10: the same table twice."""
    table = OLD + " 8388608    5000             24063.11            24056.74   0.003007\n"
    row = result(table + "-----\n" + table, 8388608)
    assert row is not None
    assert row.average_gbps == pytest.approx(201.8, abs=0.05)


def test_a_sweep_gives_the_size_that_was_asked_for_else_the_largest() -> None:
    text = sides("bw-all-sizes")["client"].stdout
    asked, best = result(text, 1048576), result(text)
    assert asked is not None
    assert best is not None
    assert (asked.size, asked.average_gbps) == (1048576, 0.037486)
    assert best.size == 8388608


def test_a_run_without_end_gives_its_last_row_even_without_a_newline() -> None:
    row = result(sides("fault-run-infinitely-then-int-client")["client"].stdout)
    assert row is not None
    assert row.average_gbps == 0.01517


def test_a_servers_garbage_row_is_no_result() -> None:
    assert result(sides("err-mismatch-qps")["server"].stdout) is None


@pytest.mark.parametrize(
    "line", [" 65536 10 0.0 nan 0.1", " 65536 10 0.0 -3 0.1", " 65536 10 0.0 1e9 0.1", " 0 10 0 1 0"]
)
def test_numbers_that_cannot_be_true_are_no_row(line: str) -> None:
    assert result(GBITS + line) is None


def test_an_unknown_unit_is_refused_instead_of_guessed() -> None:
    assert result(GBITS.replace("average[Gb/sec]", "average[Tb/sec]") + " 65536 10 0.0 1.0 0.1") is None


def test_zero_is_not_a_measurement() -> None:
    row = result(sides("bw-d3")["client"].stdout)
    assert row is not None
    assert not row.measured


def test_a_json_report_counts_only_where_it_is_json() -> None:
    """PT01: before 24.01 the file has bare words and trailing commas."""
    assert from_json((ROCE / "out_json-A.json").read_text(), gbits=True) is None
    valid = '{"test_info": {}, "results": {"MsgSize": 65536, "n_iterations": 300, "BW_average": 0.038, "MsgRate": 0.1}}'
    assert from_json(valid, gbits=True) == Row(65536, 300, 0.038, None, 0.1)


def test_the_version_and_the_options_are_read_from_the_program() -> None:
    assert perftest.version((ROCE / "version.txt").read_text()) == "6.06"
    named = perftest.options((ROCE / "help.txt").read_text())
    assert {"report_gbits", "gid-index", "duration"} <= named
    assert "use_cuda" not in named


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ("6.06", "6.06", ""),
        ("6.06", "6.28", ""),
        ("5.60", "6.06", "before 5.70"),
        ("6.28", "5.6", "before 5.70"),
        ("5.77", "6.06", ""),  # 5.99 was followed by 6.00 and nothing else changed
        ("5.7", "5.70", ""),
        ("4.5", "5.6", ""),
        ("", "6.06", ""),
        ("unknown", "6.06", ""),
    ],
)
def test_versions_that_do_not_talk_are_told_apart(ours: str, theirs: str, word: str) -> None:
    said = differ(ours, theirs)
    assert (word in said) if word else said == ""


@given(st.text())
def test_any_text_is_a_row_or_none(text: str) -> None:
    row = result(text)
    assert row is None or (0 < row.size <= perftest.MOST_SIZE)
    from_json(text, gbits=False)
    perftest.version(text)
    perftest.options(text)


@given(
    st.lists(st.sampled_from([GBITS, OLD, NEW, " 65536", " 483", " 0.00", " 0.04", "\n", "[", "]", "#", "x", "1e999"]))
)
def test_any_pile_of_pieces_is_a_row_or_none(pieces: list[str]) -> None:
    row = result("".join(pieces))
    assert row is None or row.average_gbps is not None


@given(st.binary())
def test_any_json_like_bytes_are_a_row_or_none(data: bytes) -> None:
    from_json('{"results": ' + data.decode("latin-1") + "}", gbits=True)


@given(
    size=st.integers(1, 1 << 31),
    iterations=st.integers(1, 1 << 40),
    average=st.floats(0.001, 3000),
    noise=st.lists(st.text(alphabet="abc -:*", max_size=30), max_size=4),
)
def test_a_row_survives_any_words_around_it(size: int, iterations: int, average: float, noise: list[str]) -> None:
    text = (
        "\n".join(noise)
        + "\n"
        + GBITS
        + "\n".join(noise)
        + f"\n {size} {iterations} 0.00 {average!r} 0.1\n"
        + "\n".join(noise)
    )
    assert result(text, size) == Row(size, iterations, average, None, 0.1)


def test_a_line_without_the_two_counts_is_no_heading() -> None:
    assert heading("65536 1 2 3 4") == ()
    assert heading("#bytes") == ()
