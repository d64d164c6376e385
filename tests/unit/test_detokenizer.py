from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ktserve.api.detokenizer import Detokenizer, TokenBytes, UnsupportedTokenizer
from ktserve.models.source import resolve
from ktserve.models.tokenizer import load_tokenizer

VOCABULARY = 49152
LONGEST_WAIT = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    source = resolve(
        None, "dummy", None, tmp_path_factory.mktemp("cache"), lambda _done, _all: None
    )
    assert source.directory is not None
    return load_tokenizer(source.directory)


@pytest.fixture(scope="module")
def table(tokenizer: PreTrainedTokenizerFast) -> TokenBytes:
    return TokenBytes(tokenizer)


@pytest.fixture(scope="module")
def byte_ids(table: TokenBytes) -> dict[int, int]:
    """The token of each single byte."""
    found = {}
    for token_id in range(VOCABULARY):
        data = table.of(token_id)
        if len(data) == 1:
            found[data[0]] = token_id
    assert len(found) > 200
    return found


def pieces(table: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=60))
def test_pieces_join_to_the_tokenizers_text_for_any_ids(
    tokenizer: PreTrainedTokenizerFast, table: TokenBytes, ids: list[int]
) -> None:
    assert "".join(pieces(table, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_run_of_bytes_is_decoded_as_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast,
    table: TokenBytes,
    byte_ids: dict[int, int],
    data: bytes,
) -> None:
    ids = [byte_ids[byte] for byte in data if byte in byte_ids]
    assert "".join(pieces(table, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("start", [0x80, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF1, 0xF4])
def test_malformed_sequences_of_every_kind(
    tokenizer: PreTrainedTokenizerFast, table: TokenBytes, byte_ids: dict[int, int], start: int
) -> None:
    for second in (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC3):
        for third in (None, 0x41, 0x80, 0xE2):
            data = [byte for byte in (start, second, third) if byte is not None]
            ids = [byte_ids[byte] for byte in data if byte in byte_ids]
            assert "".join(pieces(table, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_no_piece_of_real_text_holds_a_broken_character(
    tokenizer: PreTrainedTokenizerFast, table: TokenBytes, text: str
) -> None:
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    # Its vocabulary has no token for a few bytes, such as 0xF1: such text loses them on the way in.
    assume(tokenizer.decode(ids) == text and "\ufffd" not in text)
    parts = pieces(table, ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40))
def test_at_most_three_bytes_wait(table: TokenBytes, byte_ids: dict[int, int], data: bytes) -> None:
    detokenizer = Detokenizer(table)
    shown = 0
    pushed = b""
    for byte in data:
        if byte in byte_ids:
            pushed += bytes([byte])
            shown += len(detokenizer.push(byte_ids[byte]))
            final = pushed[: len(pushed) - LONGEST_WAIT].decode(errors="ignore")
            assert shown >= len(final)


def test_a_character_split_over_tokens_comes_whole(
    tokenizer: PreTrainedTokenizerFast, table: TokenBytes
) -> None:
    ids = tokenizer.backend_tokenizer.encode("𓀀", add_special_tokens=False).ids
    assert len(ids) > 1
    assert [part for part in pieces(table, ids) if part] == ["𓀀"]


def test_an_unfinished_character_is_flushed_once(
    tokenizer: PreTrainedTokenizerFast, table: TokenBytes
) -> None:
    ids = tokenizer.backend_tokenizer.encode("ok𓀀", add_special_tokens=False).ids[:-1]
    parts = pieces(table, ids)
    assert parts[-1] == "\ufffd"
    assert "".join(parts) == tokenizer.decode(ids) == "ok\ufffd"


def test_special_tokens_and_ids_outside_the_vocabulary_add_nothing(table: TokenBytes) -> None:
    assert "".join(pieces(table, [1, 2, VOCABULARY + 5])) == ""
    assert table.of(1) == b"<|im_start|>"


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend
    )
    return tokenizer


def sentencepiece() -> PreTrainedTokenizerFast:
    words = ["▁Hello", "▁", "日", "x"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + place for place, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(backend)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(
        st.one_of(
            st.integers(256, 259).map(lambda token_id: [token_id]),
            st.characters(exclude_categories=["Cs"]).map(
                lambda character: list(character.encode())
            ),
        ),
        max_size=20,
    ).map(lambda runs: [token_id for run in runs for token_id in run])
)
def test_byte_tokens_of_valid_text_join_to_the_tokenizers_text(ids: list[int]) -> None:
    tokenizer = sentencepiece()
    assert "".join(pieces(TokenBytes(tokenizer), ids)) == tokenizer.decode(ids)


def test_a_valid_character_survives_an_invalid_byte_after_it() -> None:
    tokenizer = sentencepiece()
    ids = [*"日".encode(), 0xFF]
    assert "".join(pieces(TokenBytes(tokenizer), ids)) == "日\ufffd"
    # What the tokenizer does instead could only be known at the run's end.
    assert tokenizer.decode(ids) == "\ufffd" * 4


def test_a_decoder_that_is_no_run_of_bytes_is_refused() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        TokenBytes(wrapped(backend))
