"""The routes under /v1. Each asks for the authenticated tenant, so none can be reached without.

What is no route there is refused in `ktserve.api.app`, which asks for a key first as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ktserve.api import fields
from ktserve.api.admitted import AdmittedResponse
from ktserve.api.answering import GenerationResponse, Plan
from ktserve.api.auth import Authenticated, service_of
from ktserve.api.chat import plan_chat
from ktserve.api.completions import plan_completion
from ktserve.api.conversation import read_messages
from ktserve.api.errors import invalid
from ktserve.api.limits import Place
from ktserve.api.sampling import token_id
from ktserve.api.schemas import ModelCard, ModelList, Text, Tokens
from ktserve.api.service import Service
from ktserve.tenancy.tenants import Tenant

Planner = Callable[[Service, Place, Mapping[str, object]], Awaitable[Plan]]

router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat_completions(request: Request, tenant: Authenticated) -> Response:
    """OpenAI's chat completion."""
    return _generation(request, tenant, plan_chat)


@router.post("/completions")
async def completions(request: Request, tenant: Authenticated) -> Response:
    """OpenAI's completion."""
    return _generation(request, tenant, plan_completion)


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
async def tokenize(request: Request, tenant: Authenticated) -> Response:
    """The token ids of a prompt, or of a conversation under the chat template."""
    return AdmittedResponse(request, tenant, _tokenize)


@router.post("/detokenize")
async def detokenize(request: Request, tenant: Authenticated) -> Response:
    """The text of token ids."""
    return AdmittedResponse(request, tenant, _detokenize)


def _generation(request: Request, tenant: Tenant, plan: Planner) -> Response:
    started = service_of(request).clock()

    async def answer(service: Service, place: Place, body: Mapping[str, object]) -> Response:
        return GenerationResponse(service, await plan(service, place, body), started)

    return AdmittedResponse(request, tenant, answer)


async def _tokenize(service: Service, _place: Place, body: Mapping[str, object]) -> Response:
    fields.TOKENIZE_FIELDS.check(body)
    service.check_model(fields.MODEL.of(body))
    info = service.ready_info()
    messages, prompt = fields.MESSAGES.of(body), fields.TEXT_PROMPT.of(body)
    if (messages is None) == (prompt is None):
        raise invalid("prompt", "or messages is required, and not both")
    special = fields.ADD_SPECIAL_TOKENS.of(body)
    generation_prompt = fields.ADD_GENERATION_PROMPT.of(body)
    tokenization, param = service.tokenization, "prompt"
    if prompt is None:
        param = "messages"
        prompt = await tokenization.render(
            read_messages(messages or [], info),
            info,
            add_generation_prompt=generation_prompt is not False,
        )
    tokenization.check_length(prompt, info, param)
    # The template writes the special tokens of a conversation itself.
    add_special_tokens = messages is None if special is None else special
    (tokens,) = await tokenization.encode([prompt], add_special_tokens=add_special_tokens)
    names = None
    if fields.RETURN_TOKEN_STRS.of(body):
        names = [tokenization.token_text(token) for token in tokens]
    return _json(
        Tokens(
            count=len(tokens),
            max_model_len=info.context_length,
            tokens=tokens,
            token_strs=names,
        )
    )


async def _detokenize(service: Service, _place: Place, body: Mapping[str, object]) -> Response:
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


def _model_card(service: Service) -> ModelCard:
    info = service.engine.info
    return ModelCard(
        id=service.model,
        created=service.created,
        max_model_len=None if info is None else info.context_length,
    )


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
