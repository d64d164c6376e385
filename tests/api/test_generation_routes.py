"""Chat and completions, streamed and not, against an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from ktserve.api.detokenizer import TokenBytes
from ktserve.api.engine_client import EngineError
from ktserve.api.generation import Job, generate
from ktserve.messages import Request, SamplingParams, TokenLogprobs, TokenOutput
from ktserve.tenancy.namespace import Namespace
from ktserve.tokens import pack, unpack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last is the text ``[DONE]`` or an error."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") for line in lines[:-1])
    payloads = [line.removeprefix("data: ") for line in lines[:-1]]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def streamed_text(chunks: Sequence[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
        if choice["index"] == index
    )


def test_a_chat_answer_has_openais_shape(lab: Any) -> None:
    answer = lab.post(lab.says("Hi there", cached=7), CHAT, {**HELLO, "model": "tiny"}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(lab.ids("Hi there")) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


def test_cached_tokens_is_zero_and_not_null(lab: Any) -> None:
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "Hello"})):
        usage = lab.post(lab.says("Hi"), path, body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_prompt_is_the_chat_template_of_transformers(lab: Any) -> None:
    engine = lab.says("Hi")
    conversation = [
        {"role": "system", "content": "Be brief <|im_end|>"},
        {"role": "user", "content": "Hello"},
    ]
    lab.post(engine, CHAT, {"messages": conversation})
    expected = lab.tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert unpack(engine.requests[0].prompt).tolist() == expected["input_ids"]


def test_content_parts_and_the_developer_role(lab: Any) -> None:
    engine, plain = lab.says("Hi"), lab.says("Hi")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    lab.post(
        engine,
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": "Be brief"},
                {"role": "user", "content": parts},
            ]
        },
    )
    lab.post(
        plain,
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "one\ntwo"},
            ]
        },
    )
    assert engine.requests[0].prompt == plain.requests[0].prompt


def test_a_chat_stream_has_openais_events(lab: Any) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(lab.post(lab.says("Hi there", cached=3), CHAT, body))
    assert chunks[-1] == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks[:-1])
    assert streamed_text(chunks) == "Hi there"
    endings = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]]
    assert [(ending["delta"], ending["finish_reason"]) for ending in endings] == [({}, "stop")]
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


def test_a_stream_without_include_usage_has_no_usage(lab: Any) -> None:
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "Hello"})):
        chunks = events(lab.post(lab.says("Hi"), path, {**body, "stream": True}))
        assert all("usage" not in chunk for chunk in chunks[:-1])


def test_a_completion_stream_has_openais_events(lab: Any) -> None:
    body = {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(lab.post(lab.says("Hi there"), COMPLETIONS, body))
    assert chunks[0]["id"].startswith("cmpl-")
    assert chunks[0]["object"] == "text_completion"
    assert streamed_text(chunks) == "Hi there"
    assert [c["finish_reason"] for chunk in chunks[:-2] for c in chunk["choices"]][-1] == "stop"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == len(lab.ids("Hi there")) + 1


@pytest.mark.parametrize(
    "text", ["日本語と中文", "👩‍👩‍👧‍👦 and 🏳️‍🌈", "مرحبا بالعالم", "def f(x):\n\treturn  x\n", "𓀀𓀁"]
)
@pytest.mark.parametrize("stop", [[], ["本語"], ["👧", "ل"], ["turn "]])
def test_a_stream_gives_the_same_text_as_one_answer(lab: Any, text: str, stop: list[str]) -> None:
    body = {"prompt": "Hello", "max_tokens": 200, "stop": stop}
    whole = lab.post(lab.says(text), COMPLETIONS, body).json()
    chunks = events(lab.post(lab.says(text), COMPLETIONS, {**body, "stream": True}))
    assert streamed_text(chunks) == whole["choices"][0]["text"]
    expected = min((text.partition(item)[0] for item in stop), key=len, default=text)
    assert whole["choices"][0]["text"] == expected


def test_a_stop_string_across_tokens_ends_the_text_and_the_request(lab: Any) -> None:
    ids = lab.ids("one two three four")
    engine = lab.says("one two three four")
    answer = lab.post(engine, COMPLETIONS, {"prompt": "x", "stop": "o three"}).json()
    assert answer["choices"][0]["text"] == "one tw"
    assert answer["choices"][0]["finish_reason"] == "stop"
    until = next(n for n in range(len(ids)) if "o three" in lab.tokenizer.decode(ids[:n]))
    assert answer["usage"]["completion_tokens"] == until
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_reader_that_is_slow_does_not_keep_the_engine_at_it(lab: Any) -> None:
    engine = lab.says("one two three four")
    request = Request(
        request_id=1,
        namespace=Namespace(tenant="t", cache_salt=None, extra_key=None, adapter=None),
        prompt=pack([500]),
        sampling=SamplingParams(max_tokens=9),
    )

    async def work() -> list[int]:
        job = Job(request=request, prompt=0, stops=("two",))
        async for piece in generate(engine, TokenBytes(lab.tokenizer), [job]):
            if piece.finish is not None:
                return list(engine.aborted)
        raise AssertionError("it never finished")

    assert asyncio.run(work()) == [1]


def test_text_that_only_begins_a_stop_string_is_given_out_at_the_end(lab: Any) -> None:
    engine = lab.says("one two")
    answer = lab.post(engine, COMPLETIONS, {"prompt": "x", "stop": " two three"}).json()
    assert answer["choices"][0]["text"] == "one two"
    assert engine.aborted == []


def test_min_tokens_holds_for_stop_strings(lab: Any) -> None:
    text = "one two one two"
    for minimum, expected in ((0, "one"), (3, "one two one")):
        body = {"prompt": "x", "stop": " two", "min_tokens": minimum}
        answer = lab.post(lab.says(text), COMPLETIONS, body).json()
        assert answer["choices"][0]["text"] == expected


def test_n_sends_the_same_prompt_with_the_next_seeds(lab: Any) -> None:
    engine = lab.says("Hi", cached=5)
    body = {**HELLO, "n": 3, "seed": 2**63 - 2, "cache_salt": "s"}
    answer = lab.post(engine, CHAT, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({request.prompt for request in engine.requests}) == 1
    assert len({request.namespace for request in engine.requests}) == 1
    assert [request.sampling.seed for request in engine.requests] == [
        2**63 - 2,
        2**63 - 1,
        -(2**63),
    ]
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt) // 4
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_choices_finding_each_others_pages_are_not_a_hit_of_the_request(lab: Any) -> None:
    cold_then_warm = iter([0, 9])

    def script(_request: Request) -> list[TokenOutput]:
        return [
            TokenOutput(
                request_id=0, token_ids=[500], cached_tokens=next(cold_then_warm), finish="length"
            )
        ]

    engine = lab.says("")
    engine.script = script
    usage = lab.post(engine, COMPLETIONS, {"prompt": "x", "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a b", ["a b"]),
        (["a b", "c"], ["a b", "c"]),
        ([500, 501], [[500, 501]]),
        ([[500, 501], [502]], [[500, 501], [502]]),
    ],
)
def test_every_form_of_prompt(lab: Any, prompt: Any, sent: list[Any]) -> None:
    engine = lab.says("Hi")
    answer = lab.post(engine, COMPLETIONS, {"prompt": prompt}).json()
    expected = [lab.ids(item) if isinstance(item, str) else item for item in sent]
    assert [unpack(request.prompt).tolist() for request in engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected)


def test_choices_of_a_batch_come_prompt_by_prompt(lab: Any) -> None:
    engine = lab.says("Hi")
    answer = lab.post(engine, COMPLETIONS, {"prompt": [[500], [501]], "n": 2}).json()
    assert [unpack(request.prompt).tolist() for request in engine.requests] == [
        [500],
        [500],
        [501],
        [501],
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_max_tokens_by_default_is_16_for_text_and_what_fits_for_chats(lab: Any) -> None:
    engine = lab.says("Hi")
    lab.post(engine, COMPLETIONS, {"prompt": "Hello"})
    assert engine.requests[0].sampling.max_tokens == 16
    engine = lab.says("Hi")
    lab.post(engine, CHAT, HELLO)
    request = engine.requests[0]
    assert request.sampling.max_tokens == 2048 - len(request.prompt) // 4


def test_sampling_fields_reach_the_engine(lab: Any) -> None:
    engine = lab.says("Hi")
    lab.post(
        engine,
        COMPLETIONS,
        {
            "prompt": "x",
            "max_tokens": 9,
            "min_tokens": 2,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.25,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "repetition_penalty": 1.5,
            "logit_bias": {"7": -100, "8": 1.5},
            "seed": -1,
            "stop_token_ids": [4, 5],
            "ignore_eos": True,
            "logprobs": 3,
            "user": "u",
            "best_of": 1,
        },
    )
    params = engine.requests[0].sampling
    assert params.max_tokens == 9
    assert (params.min_tokens, params.temperature, params.top_p, params.top_k) == (2, 0.0, 0.5, 0)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.25, -2.0, 2.0)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == {7: -100.0, 8: 1.5}
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (-1, (4, 5), True)
    assert params.logprobs == 3


def test_chat_logprobs_report_every_token_with_its_bytes(lab: Any) -> None:
    text = "Hé日"
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    answer = lab.post(lab.says(text), CHAT, body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    data = b"".join(bytes(token["bytes"]) for token in content[:-1])
    assert data.decode() == text
    assert content[-1]["token"] == "<|im_end|>"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]


def test_completion_logprobs_have_offsets_and_names_that_differ(lab: Any) -> None:
    ids = lab.ids("a𓀀b")
    answer = lab.post(lab.says("a𓀀b"), COMPLETIONS, {"prompt": "x", "logprobs": 1}).json()
    report = answer["choices"][0]["logprobs"]
    assert len(report["tokens"]) == len(ids) + 1 == len(report["text_offset"])
    assert report["text_offset"][:2] == [0, 1]
    assert report["text_offset"][-1] == 3
    assert any(name.startswith("bytes:\\xf0") for name in report["tokens"])


@pytest.mark.parametrize("logprobs", [0, 2])
def test_completion_logprobs_have_the_chosen_token_too(lab: Any, logprobs: int) -> None:
    (chosen,), others = lab.ids("x"), [*lab.ids("y"), *lab.ids("z")]
    top = [(other, -0.5) for other in others[:logprobs]]
    engine = lab.says("")
    engine.script = lambda _request: [
        TokenOutput(
            request_id=0,
            token_ids=[chosen],
            cached_tokens=0,
            logprobs=[TokenLogprobs(logprob=-7.5, top=top)],
            finish="length",
        )
    ]
    answer = lab.post(engine, COMPLETIONS, {"prompt": "x", "logprobs": logprobs}).json()
    expected = {"y": -0.5, "z": -0.5, "x": -7.5} if logprobs else {"x": -7.5}
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [expected]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_logprobs_are_those_of_one_answer(lab: Any, path: str) -> None:
    body = {**HELLO, "logprobs": True} if path == CHAT else {"prompt": "x", "logprobs": 0}
    body["stop"] = "日x"
    whole = lab.post(lab.says("Hé日本"), path, body).json()["choices"][0]["logprobs"]
    chunks = events(lab.post(lab.says("Hé日本"), path, {**body, "stream": True}))
    parts = [c["logprobs"] for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]]
    for name, values in whole.items():
        if values is not None:
            assert [value for part in parts for value in part[name]] == values


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "retry_after"),
    [(429, "queue_full", 3), (503, "engine_lost", 5), (400, "never_fits", None)],
)
def test_the_engines_refusal_is_the_status(
    lab: Any, stream: bool, status: int, code: str, retry_after: int | None
) -> None:
    engine = lab.says("")
    engine.script = lambda _request: [EngineError(status, code, "says why", retry_after)]
    response = lab.post(engine, CHAT, {**HELLO, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == "says why"
    expected = None if retry_after is None else str(retry_after)
    assert response.headers.get("retry-after") == expected


def test_a_failure_in_a_stream_is_an_event_without_done(lab: Any) -> None:
    engine = lab.says("")
    engine.script = lambda _request: [
        TokenOutput(request_id=0, token_ids=lab.ids("Hi"), cached_tokens=0),
        EngineError(503, "engine_lost", "the engine is gone", 5),
    ]
    response = lab.post(engine, CHAT, {**HELLO, "stream": True})
    assert response.status_code == 200
    chunks = events(response)
    assert streamed_text(chunks) == "Hi"
    assert chunks[-1]["error"]["code"] == "engine_lost"


def test_the_failure_of_one_choice_ends_the_others(lab: Any) -> None:
    engine = lab.says("")
    waiting = TokenOutput(request_id=0, token_ids=lab.ids("Hi"), cached_tokens=0)

    def script(request: Request) -> list[Any]:
        if request.request_id == 2:
            return [EngineError(429, "queue_full", "full", 1)]
        return [waiting, asyncio.Event()]

    engine.script = script
    response = lab.post(engine, COMPLETIONS, {"prompt": "x", "n": 3})
    assert response.status_code == 429
    assert sorted(engine.aborted) == [1, 3]


def test_no_engine_is_a_503(lab: Any) -> None:
    engine = lab.says("Hi")
    engine.info = None
    response = lab.post(engine, CHAT, HELLO)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert int(response.headers["retry-after"]) > 0
