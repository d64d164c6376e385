"""How generated tokens become text, one at a time.

A token is a run of bytes, not of characters: a character may be spread over several tokens and one
token may hold parts of two. So the table gives each token's bytes, and a detokenizer feeds them to
an incremental UTF-8 decoder. A UTF-8 character has at most four bytes, so at most three bytes wait
for the next token; everything before them is final. That makes each step O(1), never splits,
repeats or drops a character, and makes the joined pieces equal to the tokenizer's own decoding of
all the tokens, because that is the same bytes through the same decoding (the maximal-subpart
replacement of invalid bytes, Unicode 15 section 3.9, is what Rust's and Python's decoders do).

For vocabularies with byte tokens (``<0x0A>``, as SentencePiece has them) there is one difference:
the tokenizer turns a whole run of byte tokens into U+FFFD when any part of the run is invalid,
which cannot be known before the run ends. Here the valid characters of such a run are kept.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder is none of those whose tokens are runs of bytes."""


class TokenBytes:
    """The bytes of each token of one tokenizer.

    Raises:
        UnsupportedTokenizer: the tokenizer's decoder is neither byte-level nor SentencePiece's
            chain of replacements, byte tokens and a stripped first space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_tokens = False
        self.strip_first: tuple[str, int] = ("", 0)
        decoder = self._backend.decoder
        steps = _steps(None if decoder is None else json.loads(decoder.__getstate__()))
        self.is_byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        if not self.is_byte_level:
            self._read_steps(steps)

    def of(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` adds to a text; empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        return token.encode() if byte is None else bytes([int(byte.group(1), 16)])

    def _read_steps(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_tokens = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0}:
                    self.strip_first = (content, start)
                case _:
                    raise UnsupportedTokenizer(
                        f"the tokenizer's decoder has a step {step.get('type')!r} that this "
                        "version cannot follow token by token; use a model with a byte-level or "
                        "SentencePiece tokenizer"
                    )


class Detokenizer:
    """The text of one sequence, grown token by token; special tokens add nothing to it."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip, self._strip_left = table.strip_first

    def push(self, token_id: int) -> str:
        """The characters that ``token_id`` completes; often one token's, sometimes none."""
        if token_id in self._table.special_ids:
            return ""
        return self._stripped(self._decoder.decode(self._table.of(token_id)))

    def finish(self) -> str:
        """What an unfinished last character leaves: U+FFFD, or nothing. Ends the text."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedTokenizer(
            "the tokenizer has no decoder; use a model with a byte-level or SentencePiece tokenizer"
        )
    if decoder["type"] != "Sequence":
        return [decoder]
    steps: list[dict[str, Any]] = decoder["decoders"]
    return steps


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_level_alphabet()
