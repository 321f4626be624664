from hypothesis import given as over
from hypothesis import strategies as st

from llmgw.node.engines.flags import conflicts, flags, given, shortened, value, whole


def test_options_are_read_in_every_spelling() -> None:
    assert list(flags(["--a_b=1", "--c", "2", "-d", "--e", "-1", "x"])) == [
        ("--a-b", "1"),
        ("--c", "2"),
        ("-d", None),
        ("--e", "-1"),
    ]


def test_the_last_of_an_option_counts() -> None:
    assert value(["--tp", "2", "--tp-size=4"], "--tp", "--tp-size") == "4"
    assert whole(["--tp", "x"], "--tp") is None


def test_a_value_that_looks_like_ours_is_no_option() -> None:
    assert not given(["--stop", "port"], "--port")
    assert list(conflicts(["--template", "host"], {"--host": "no"})) == []


def test_what_is_cut_short_is_told_by_its_whole_name() -> None:
    (one,) = shortened(["--po", "80", "--tp", "2", "--", "-"], "--port", "--tp", "--tp-size")
    assert one.text == "--po is short for --port"


@over(st.lists(st.text(max_size=12), max_size=12))
def test_any_words_can_be_looked_at(words: list[str]) -> None:
    assert all(name.startswith("-") for name, _ in flags(words))
