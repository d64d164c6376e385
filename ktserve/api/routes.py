"""The routes under /v1. Each asks for the authenticated tenant, so none can be reached without."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from ktserve.api import fields
from ktserve.api.answering import GenerationResponse
from ktserve.api.auth import Authenticated, service_of
from ktserve.api.bodies import read_object
from ktserve.api.chat import plan_chat
from ktserve.api.completions import plan_completion
from ktserve.api.conversation import read_messages
from ktserve.api.errors import ApiError, invalid, shown
from ktserve.api.sampling import token_id
from ktserve.api.schemas import ModelCard, ModelList, Text, Tokens
from ktserve.api.service import Service

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat_completions(request: Request, tenant: Authenticated) -> Response:
    """OpenAI's chat completion."""
    service = service_of(request)
    started = service.clock()
    body = await read_object(request, service.settings.max_request_bytes)
    return GenerationResponse(service, await plan_chat(service, tenant, body), started)


@router.post("/completions")
async def completions(request: Request, tenant: Authenticated) -> Response:
    """OpenAI's completion."""
    service = service_of(request)
    started = service.clock()
    body = await read_object(request, service.settings.max_request_bytes)
    return GenerationResponse(service, await plan_completion(service, tenant, body), started)


@router.get("/models")
async def models(request: Request, _tenant: Authenticated) -> Response:
    """The one served model, as a list."""
    return _json(ModelList(data=[_model_card(service_of(request))]))


@router.get("/models/{name:path}")
async def model(request: Request, name: str, _tenant: Authenticated) -> Response:
    """The served model, by its name."""
    service = service_of(request)
    service.check_model(name)
    return _json(_model_card(service))


@router.post("/tokenize")
async def tokenize(request: Request, _tenant: Authenticated) -> Response:
    """The token ids of a prompt, or of a conversation under the chat template."""
    service = service_of(request)
    body = await read_object(request, service.settings.max_request_bytes)
    fields.TOKENIZE_FIELDS.check(body)
    service.check_model(fields.MODEL.of(body))
    info = service.ready_info()
    messages, prompt = fields.MESSAGES.of(body), fields.TEXT_PROMPT.of(body)
    if (messages is None) == (prompt is None):
        raise invalid("prompt", "or messages is required, and not both")
    special = fields.ADD_SPECIAL_TOKENS.of(body)
    if prompt is None:
        generation_prompt = fields.ADD_GENERATION_PROMPT.of(body)
        text = await service.tokenization.render(
            read_messages(messages or []), add_generation_prompt=generation_prompt is not False
        )
    else:
        text = prompt
    # The template writes the special tokens of a conversation itself.
    add_special_tokens = messages is None if special is None else special
    (tokens,) = await service.tokenization.encode([text], add_special_tokens=add_special_tokens)
    names = None
    if fields.RETURN_TOKEN_STRS.of(body):
        names = [service.tokenization.token_text(token) for token in tokens]
    return _json(
        Tokens(
            count=len(tokens),
            max_model_len=info.context_length,
            tokens=tokens,
            token_strs=names,
        )
    )


@router.post("/detokenize")
async def detokenize(request: Request, _tenant: Authenticated) -> Response:
    """The text of token ids."""
    service = service_of(request)
    body = await read_object(request, service.settings.max_request_bytes)
    fields.DETOKENIZE_FIELDS.check(body)
    service.check_model(fields.MODEL.of(body))
    info = service.ready_info()
    tokens = fields.TOKENS.of(body)
    if tokens is None:
        raise invalid("tokens", "is required", code="missing_required_parameter")
    if len(tokens) > info.context_length:
        raise invalid("tokens", f"has {len(tokens)} entries; the limit is {info.context_length}")
    ids = [token_id("tokens", item, info.vocab_size) for item in tokens]
    return _json(Text(prompt=await service.tokenization.decode(ids)))


@router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def unknown(request: Request, path: str, _tenant: Authenticated) -> Response:
    """Everything else under /v1, so that it asks for a key like the rest."""
    if any(route.matches(request.scope)[0] is Match.PARTIAL for route in router.routes):
        raise ApiError(
            405, f"{request.method} is not allowed on /v1/{shown(path)}", code="method_not_allowed"
        )
    raise ApiError(
        404,
        f"{request.method} /v1/{shown(path)} does not exist in this version",
        code="unknown_url",
    )


def _model_card(service: Service) -> ModelCard:
    info = service.engine.info
    return ModelCard(
        id=service.model,
        created=service.created,
        max_model_len=None if info is None else info.context_length,
    )


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
