"""Prompts of about a given number of tokens, which no server has seen before.

They are random common words. Nearly every tokenizer has such a word with the space before it as one
token, so that counts are about right everywhere. Random words from the first one on also make every
prompt new: two prompts differ at their very start, and no cache can know them.
"""

from __future__ import annotations

import random

from ktserve.bench.target import Prompt, Target

_WORDS = """
able about above across act add after again age air all alone along also always among and animal
answer any appear area arm arrive art ask away baby back bad ball bank base beach bear beat bed
begin behind bell below best better between big bird black blood blue board boat body bone book
born both bottom box boy branch bread break bridge bright bring broken brother brown build burn
busy buy call calm camp captain car card care carry case cat catch cause center chair chance
change chief child choose church circle city clean clear climb clock close cloth cloud coat cold
color come common cook cool copper copy corn corner cost count country course cover cow cross
crowd cry cut dance dark daughter day dead deal dear deep desert design dinner direct distance
doctor dog door double down draw dream dress drink drive drop dry dust duty each ear early earth
east easy eat edge egg eight empty end enemy engine enough enter equal even evening event ever
every exact eye face fact fair fall family famous far farm fast father fear feel feet few field
fight figure fill final find fine finger finish fire first fish five flag flat floor flow flower
fly follow food foot force forest form four free fresh friend front fruit full game garden gate
"""
WORDS = tuple(_WORDS.split())
_SAMPLE_WORDS = (40, 240)
_SYSTEM_WORDS = 8
_TOKENS_PER_WORD = 1.0
_TEMPLATE_TOKENS = 20


class Sizing:
    """How many words make how many tokens on one server.

    Attributes:
        per_word: tokens that one more word adds.
        overhead: tokens of a prompt without words: the chat template's own.
        source: where the figures come from, for the record.
    """

    def __init__(self, per_word: float, overhead: float, source: str) -> None:
        self.per_word = per_word
        self.overhead = overhead
        self.source = source

    def words(self, tokens: int, *, template: bool = True) -> int:
        """Words for about ``tokens`` tokens, at least one; with the ``template``'s share or not."""
        overhead = self.overhead if template else 0.0
        return max(1, round((tokens - overhead) / self.per_word))


async def measure_sizing(target: Target, rng: random.Random) -> Sizing:
    """The sizing for ``target``, from its usage counts for a short and a longer prompt.

    A server that reports no usage but has ``/v1/tokenize`` is asked there, which leaves the
    template's share to a guess; one with neither gets one token a word.

    Raises:
        RequestFailed: a request to find out failed.
    """
    counts = []
    for words in _SAMPLE_WORDS:
        sample = await target.stream(fresh(rng, words), 1)
        counts.append(sample.prompt_tokens)
    short, long = counts
    if short is not None and long is not None and long > short:
        per_word = (long - short) / (_SAMPLE_WORDS[1] - _SAMPLE_WORDS[0])
        return Sizing(per_word, short - per_word * _SAMPLE_WORDS[0], "usage.prompt_tokens")
    tokens = await target.count_tokens(text(rng, _SAMPLE_WORDS[1]))
    if tokens:
        return Sizing(tokens / _SAMPLE_WORDS[1], _TEMPLATE_TOKENS, "/v1/tokenize")
    return Sizing(_TOKENS_PER_WORD, _TEMPLATE_TOKENS, "guess")


def fresh(rng: random.Random, words: int) -> Prompt:
    """A prompt of ``words`` words that no cache can know.

    Its first words are the system's: many chat templates otherwise begin every prompt with the same
    default text, which is cached after the first.
    """
    system = min(_SYSTEM_WORDS, words // 2)
    return Prompt(text(rng, words - system), text(rng, system))


def text(rng: random.Random, words: int) -> str:
    """``words`` random words."""
    return " ".join(rng.choices(WORDS, k=words))
