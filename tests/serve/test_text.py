"""Text as it comes: whole characters, and stop strings cut exactly wherever the pieces end."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fewstep.serve.text import Detokenizer, Stops
from tests.tiny import SPECIAL, VOCAB, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def pieces(ids, tokenizer=TOKENIZER):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_concatenate_to_the_text_of_all_tokens(seed):
    """Random bytes: broken characters, special tokens in between, an unfinished end."""
    rng = random.Random(seed)
    text = "".join(rng.choice(["é", "日本", "🙂", "a b", "\n", " ", "ñ"]) for _ in range(20))
    whole = TOKENIZER(text)["input_ids"]
    for ids in (
        whole,
        whole[: len(whole) // 2],
        [rng.choice(whole) for _ in range(60)],
        [rng.randrange(VOCAB) for _ in range(60)],
    ):
        assert "".join(pieces(ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_character_of_several_tokens_comes_whole():
    assert pieces(TOKENIZER("a🙂b")["input_ids"]) == ["a", "", "", "", "🙂", "b", ""]
    assert pieces(TOKENIZER("a🙂")["input_ids"][:-1]) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_spaces_survive_a_decoder_that_strips_the_first():
    """SentencePiece's: a token decoded alone loses the space before it."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁one": 1, "▁two": 2, "s": 3}, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert pieces([1, 2, 3, 0, 2, 1], tokenizer) == ["one", " two", "s", "", " two", " one", ""]


def test_special_tokens_have_no_text():
    assert pieces([SPECIAL.index("<|im_end|>"), *TOKENIZER("x")["input_ids"]]) == ["", "x", ""]


def cut(parts, strings):
    stops = Stops(strings)
    shown = [stops.add(part) for part in parts]
    return "".join(shown) + stops.flush(), stops.hit, shown


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("aaab", ["aab"], "a"),  # the first try to match fails in its middle
        ("abcabd!", ["abd"], "abc"),
        ("no stop here", ["stop!"], None),
        ("ends like sto", ["stop"], None),
        ("abcd", ["abcd", "bc"], "a"),  # "bc" is complete first
        ("xab", ["ab", "xab"], ""),  # complete at once: the longer one
        ("anything", [], None),
        ("日本語", ["本"], "日"),
    ],
)
def test_stop_strings_cut_alike_however_the_text_is_split(text, strings, expected):
    want = (text, False) if expected is None else (expected, True)
    for mask in range(2 ** (len(text) - 1)):
        parts, last = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                parts.append(text[last:i])
                last = i
        assert cut([*parts, text[last:]], strings)[:2] == want


def test_only_what_may_become_a_stop_string_is_held_back():
    assert cut(["a", "b", "s", "t", "x"], ["stop"])[2] == ["a", "b", "", "", "stx"]
