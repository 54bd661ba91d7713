"""Bodies that are refused for one field, and the field that the refusal names."""

from collections.abc import Sequence
from typing import Any  # JSON

from tests.integration.router_stack import MODEL

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi there", "max_tokens": 5}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}

BOTH: Sequence[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "colour"),
    ({"model": 7}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 99999}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"priority": 2**31}, "priority"),
    ({"priority": -(2**31) - 1}, "priority"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["x", "y" * 257]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"priority": "high"}, "priority"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto", "tools": [{}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]

COMPLETIONS: Sequence[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"prompt": "x", "seed": 1}, "prompt"),
    ({"prompt": "x" * 3300, "echo": True, "logprobs": 20}, "logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 5, "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 5, "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": ["x"] * 17, "max_tokens": 1}, "prompt"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]

CHATS: Sequence[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "image_url", "image_url": {"url": "data:,"}},
                    ],
                }
            ]
        },
        "messages[0].content[1].type",
    ),
    (
        {"messages": [{"role": "u", "content": [{"type": "text", "text": "x", "image_url": 1}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 99999}, "max_completion_tokens"),
    ({"max_tokens": 0, "max_completion_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
]

TOKENIZE: Sequence[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "x", "messages": []}, "prompt"),
    ({"messages": []}, "messages"),
    ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
        "messages[0].content[0].type",
    ),
]

CASES = [
    *(("/v1/completions", {**COMPLETION, **change}, param) for change, param in BOTH),
    *(("/v1/chat/completions", {**CHAT, **change}, param) for change, param in BOTH),
    *(("/v1/completions", {**COMPLETION, **x}, param) for x, param in COMPLETIONS),
    *(("/v1/chat/completions", {**CHAT, **change}, param) for change, param in CHATS),
]
