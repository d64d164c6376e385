"""Which tokens the prefixes are that the operator made public, as the routes would make them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

import jinja2

from ktserve.api.errors import shown
from ktserve.api.tokenization import Tokenization
from ktserve.messages import EngineInfo, PublicPrefix
from ktserve.tenancy.tenant import PublicPrefix as Declared
from ktserve.tokens import TOKEN_BYTES, pack

log = logging.getLogger("ktserve.api")

T = TypeVar("T")

_CONTINUATIONS = ("Aa", "s", "0", " x", "\n\nx", "\tx", "...", "\u00e9", "<")
"""What may come next. They begin as differently as texts do, because the first characters of what
follows can change the last tokens before it."""


class UnusablePublicPrefix(ValueError):
    """A public prefix that no prompt could begin with; the message names it and the remedy."""


async def tokenized(
    declared: Iterable[Declared], tokenization: Tokenization
) -> tuple[PublicPrefix, ...]:
    """Each prefix for the engine, with the tokens that prompts which begin with it have in common.

    Raises:
        UnusablePublicPrefix: the model has no chat template, it does not begin with the system
            message, or nothing is common.
    """
    made = []
    for prefix in declared:
        tokens = await _tokens(prefix, tokenization)
        log.info("public prefix %s: %d tokens", prefix.name, len(tokens))
        made.append(PublicPrefix(name=prefix.name, tenants=prefix.tenants, prompt=pack(tokens)))
    return tuple(made)


def check_context(prefixes: Iterable[PublicPrefix], info: EngineInfo) -> None:
    """Refuse a prefix that no request could begin with, since one has to generate a token.

    Raises:
        UnusablePublicPrefix: it does not fit the model's context.
    """
    for prefix in prefixes:
        tokens = len(prefix.prompt) // TOKEN_BYTES
        if tokens >= info.context_length:
            raise UnusablePublicPrefix(
                f"public prefix {prefix.name}: it has {tokens} tokens; the model's context_length "
                f"of {info.context_length} has room for {info.context_length - 1} and a token of "
                "output: shorten it, or raise --context-length"
            )


async def _tokens(prefix: Declared, tokenization: Tokenization) -> list[int]:
    if prefix.system is not None:
        texts = _chats(prefix.name, prefix.system, tokenization)
    else:
        texts = [f"{prefix.text}{following}" for following in _CONTINUATIONS]
    # As the two routes do: a chat template writes the special tokens itself.
    special = prefix.system is None
    common = _common(await tokenization.encode(texts, add_special_tokens=special))
    bare = await tokenization.encode(_CONTINUATIONS, add_special_tokens=special)
    if len(common) <= len(_common(bare)):
        raise UnusablePublicPrefix(
            f"public prefix {prefix.name}: prompts that begin with it have no token of it in "
            "common; use a longer text"
        )
    return common


def _chats(name: str, system: str, tokenization: Tokenization) -> list[str]:
    """Chats that begin with the system message, also one of several turns: some templates write
    the system message before the last turn."""
    if not tokenization.has_chat_template:
        raise UnusablePublicPrefix(
            f"public prefix {name}: the model has no chat template, which system needs; use text, "
            "or start the server with --chat-template FILE"
        )
    first = {"role": "system", "content": system}
    chats = [[first, {"role": "user", "content": text}] for text in _CONTINUATIONS]
    answer = {"role": "assistant", "content": "x"}
    chats.append([*chats[0], answer, {"role": "user", "content": "y"}])
    try:
        texts = [tokenization.apply_template(chat, add_generation_prompt=True) for chat in chats]
    except jinja2.TemplateError as error:
        raise UnusablePublicPrefix(
            f"public prefix {name}: the model's chat template refuses a system message "
            f"({shown(error.message or 'it does not say why')}); use text"
        ) from None
    # Templates may strip a message.
    if system.strip() not in "".join(_common(texts)):
        raise UnusablePublicPrefix(
            f"public prefix {name}: chats do not begin with the system message under the model's "
            "chat template; use text"
        )
    return texts


def _common(sequences: Iterable[Sequence[T]]) -> list[T]:
    """The longest common prefix."""
    common: list[T] = []
    for items in zip(*sequences, strict=False):
        if len(set(items)) > 1:
            break
        common.append(items[0])
    return common
