"""Which field of the HTTP API is which of gRPC's. docs/api.md shows it; a test holds both to it."""

from collections.abc import Mapping

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "stop_token_ids", "ignore_eos",
)  # fmt: skip

COMMON: Mapping[str, str] = {
    **{name: f"sampling.{name}" for name in SAMPLING},
    "model": "model",
    "stop": "stop",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "skip_special_tokens": "keep_special_tokens, negated",
    "n": "n",
    "priority": "priority",
    "request_id": "request_id",
    "add_special_tokens": "add_special_tokens",
    "prompt_logprobs": "prompt_logprobs",
    "stream": "always",
    "stream_options": "usage and timings: always, in the last message of each choice",
    "return_token_ids": "token_ids: always; the prompt's under echo",
    "return_tokens_as_token_ids": "always: log probabilities are by token id",
    "user": "ignored over HTTP; request_id or a trace context name a caller's request",
}

COMPLETIONS: Mapping[str, str] = {
    **COMMON,
    "prompt": "text, token_ids; of several prompts each is a call",
    "echo": "echo; with max_tokens 0, too, which scores the prompt",
    "logprobs": "sampling.logprobs",
}

CHATS: Mapping[str, str] = {
    **COMMON,
    "messages": "chat.messages",
    "messages.role": "chat.messages.role",
    "messages.content": "chat.messages.content",
    "messages.name": "chat.messages.name",
    "messages.reasoning_content": "chat.messages.reasoning_content",
    "max_completion_tokens": "sampling.max_tokens",
    "logprobs": "sampling.logprobs",
    "top_logprobs": "sampling.logprobs",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
    "chat_template_kwargs": "chat.template_arguments",
}

ROUTES: Mapping[str, str] = {
    "/v1/completions": "Generate with text or token_ids",
    "/v1/chat/completions": "Generate with chat",
    "/tokenize": "Tokenize",
    "/detokenize": "Detokenize",
    "/v1/models": "ListModels",
    "/v1/models/{model}": "ListModels",
    "/ready": "grpc.health.v1.Health/Check",
}

FILLED_IN = ("sampling.eos_token_ids",)
"""Fields of gRPC's request that clients must leave alone: the router fills them in."""
