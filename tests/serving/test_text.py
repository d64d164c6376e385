"""The packaged model's text: transformers' own, and the same cold and warm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from servers import KEYS
from transformers import AutoModelForCausalLM

MODEL = "SmolLM2-135M-Instruct"

SUBJECTS = [
    *("rain", "bread", "the moon", "a violin", "glass", "bees", "tea", "gravity", "salt", "paper"),
    *("the sea", "ants", "chess", "iron", "sleep", "snow", "maps", "wool", "honey", "fire"),
]


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(
        f"{url}/v1/{path}",
        json={"model": MODEL, **body},
        headers={"Authorization": f"Bearer {KEYS['beta']}"},
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def test_greedy_chats_are_transformers_own(packaged, packaged_directory):
    """20 chats of 64 tokens. One forward pass over prompt and answer gives transformers' choice at
    each place; the answer is its greedy text if every token is that choice."""
    questions = [f"Tell me something surprising about {subject}." for subject in SUBJECTS]

    def answer(question: str) -> tuple[list[int], list[int]]:
        messages = [{"role": "user", "content": question}]
        prompt = post(packaged.url, "tokenize", {"messages": messages})["tokens"]
        body = {"messages": messages, "max_tokens": 64, "temperature": 0, "logprobs": True}
        choice = post(packaged.url, "chat/completions", body)["choices"][0]
        text = choice["message"]["content"]
        tokens = post(packaged.url, "tokenize", {"prompt": text, "add_special_tokens": False})
        assert choice["finish_reason"] in ("stop", "length")
        return prompt, tokens["tokens"] if choice["finish_reason"] == "length" else [
            *tokens["tokens"],
            2,
        ]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, questions))
    model = AutoModelForCausalLM.from_pretrained(packaged_directory, dtype=torch.float32).eval()
    tokens = 0
    for prompt, generated in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + generated])).logits[0]
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert generated == expected
        tokens += len(generated)
    assert tokens > 20 * 30


def test_cold_and_warm_text_is_the_same_on_fifty_prompts(packaged):
    prompts = [
        f"Write a short note about {subject} and {other}, number {index}."
        for index, (subject, other) in enumerate(
            zip(SUBJECTS * 3, SUBJECTS[7:] + SUBJECTS * 2, strict=False)
        )
    ][:50]
    assert len(set(prompts)) == 50

    def complete(prompt: str) -> tuple[str, int, int]:
        answer = post(
            packaged.url,
            "completions",
            {"prompt": prompt, "max_tokens": 24, "temperature": 0, "cache_salt": "fifty"},
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], cached

    with ThreadPoolExecutor(8) as pool:
        cold = list(pool.map(complete, prompts))
        warm = list(pool.map(complete, prompts))
    assert [text for text, _, _ in warm] == [text for text, _, _ in cold]
    assert all(cached == tokens - 1 for _, tokens, cached in warm)
    assert all(cached < tokens - 1 for _, tokens, cached in cold)
