"""Conversations <-> proto."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct

from splitwave.v1alpha1 import generate_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, each with role, content and what else it has, and how the template puts them."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool | None = None
    """None: unless the final message is continued."""
    continue_final_message: bool = False
    template_arguments: Mapping[str, object] = field(default_factory=dict)


def chat_from_proto(message: pb.Chat) -> Conversation:
    """A conversation as it came."""
    adds = message.add_generation_prompt if message.HasField("add_generation_prompt") else None
    return Conversation(
        messages=[_message(each) for each in message.messages],
        add_generation_prompt=adds,
        continue_final_message=message.continue_final_message,
        template_arguments=MessageToDict(message.template_arguments),
    )


def chat_to_proto(chat: Conversation) -> pb.Chat:
    """A conversation as it travels."""
    return pb.Chat(
        messages=[pb.ChatMessage(**each) for each in chat.messages],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_arguments=ParseDict(dict(chat.template_arguments), Struct()),
    )


def _message(message: pb.ChatMessage) -> dict[str, str]:
    told = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content"):
        if message.HasField(name):
            told[name] = getattr(message, name)
    return told
