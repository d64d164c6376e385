"""The messages of a chat, checked, as the chat template takes them."""

from __future__ import annotations

from ktserve.api import checks
from ktserve.api.errors import invalid, shown
from ktserve.messages import EngineInfo

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
"""The roles that are taken, and the role that the template sees: to OpenAI ``developer`` is the
newer name of ``system``, which the models' templates do not know."""

_ABSENT_ONLY = frozenset(
    {"tool_calls", "function_call", "tool_call_id", "audio", "refusal", "annotations"}
)
_KNOWN = frozenset({"role", "content", "name"})
_TEXT_PARTS = frozenset({"text", "input_text"})


def read_messages(value: list[object], info: EngineInfo) -> list[dict[str, str]]:
    """The messages with ``role``, ``content`` and, where sent, ``name``, all strings.

    Raises:
        ApiError: 400, naming the message and field at fault.
    """
    if not value:
        raise invalid("messages", "must not be empty")
    pieces = sum(1 + _parts(item) for item in value)
    if pieces > info.context_length:
        # Each costs time before its first character does.
        raise invalid(
            "messages",
            f"has {len(value)} messages and {pieces - len(value)} text parts; the limit for both "
            f"together is {info.context_length}, the model's context_length: send fewer",
            code="context_length_exceeded",
        )
    return [_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def _message(where: str, value: object) -> dict[str, str]:
    fields = checks.mapping(where, value)
    for name, content in fields.items():
        if name in _KNOWN:
            continue
        if name not in _ABSENT_ONLY:
            raise invalid(f"{where}.{shown(name)}", "is an unknown field; leave it out")
        if content is not None and content != []:
            raise invalid(
                f"{where}.{name}",
                "is not supported by this version; leave it out",
                code="unsupported_parameter",
            )
    role = checks.text(f"{where}.role", fields.get("role"))
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not '{shown(role)}'")
    message = {"role": ROLES[role], "content": _content(f"{where}.content", fields.get("content"))}
    if fields.get("name") is not None:
        message["name"] = checks.text(f"{where}.name", fields["name"])
    return message


def _parts(value: object) -> int:
    content = value.get("content") if isinstance(value, dict) else None
    return len(content) if isinstance(content, list) else 0


def _content(where: str, value: object) -> str:
    if isinstance(value, str):
        return checks.text(where, value)
    if not isinstance(value, list):
        raise invalid(
            where, f"must be a string or a list of text parts, not {checks.json_type(value)}"
        )
    texts = []
    for place, item in enumerate(value):
        part = checks.mapping(f"{where}[{place}]", item)
        kind = checks.text(f"{where}[{place}].type", part.get("type"))
        if kind not in _TEXT_PARTS:
            raise invalid(
                f"{where}[{place}].type",
                f"'{shown(kind)}' is not supported by this version; send text parts",
                code="unsupported_parameter",
            )
        if unknown := part.keys() - {"type", "text"}:
            name = shown(min(unknown))
            raise invalid(f"{where}[{place}].{name}", "is an unknown field; leave it out")
        texts.append(checks.text(f"{where}[{place}].text", part.get("text")))
    return "\n".join(texts)
