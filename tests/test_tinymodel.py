from pathlib import Path

import pytest

from llmgw.tinymodel import SENTENCES, TURN_END, followers, vocabulary, write_tiny


def test_every_beginning_of_a_word_is_a_token_so_that_the_word_itself_can_be_found() -> None:
    words = vocabulary()
    missing = {word[:n] for word in words.words for n in range(1, len(word))} - set(words.tokens)
    assert missing == set()


def test_no_two_tokens_are_the_same() -> None:
    words = vocabulary()
    assert len(set(words.tokens)) == len(words.tokens) == len(words.kinds) == len(words.scores)


def test_after_each_word_something_follows_and_the_chances_add_up() -> None:
    numbers = vocabulary().words
    spoken = [w if w == "." else "\u2581" + w for w in SENTENCES.replace(".", " .").split()]
    chances = followers(spoken, numbers)
    assert set(chances) == {None, *numbers.values()}
    assert all(sum(row.values()) == pytest.approx(1.0) for row in chances.values())
    assert TURN_END in chances[numbers["."]]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    one = write_tiny(tmp_path / "one.gguf", noise=0.02, seed=3)
    two = write_tiny(tmp_path / "two.gguf", noise=0.02, seed=3)
    other = write_tiny(tmp_path / "other.gguf", noise=0.02, seed=4)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()


def test_a_model_in_parts_is_named_by_its_first_part_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "tiny.gguf", parts=3)
    assert first.name == "tiny-00001-of-00003.gguf"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"tiny-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.mark.parametrize(("embd", "heads"), [(64, 4), (255, 4)])
def test_a_shape_that_no_llama_has_is_refused(tmp_path: Path, embd: int, heads: int) -> None:
    with pytest.raises(ValueError, match="embd"):
        write_tiny(tmp_path / "tiny.gguf", embd=embd, heads=heads)
