"""Fields of a client's message that this side's contract does not have."""

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from splitwave.core.errors import Reason, ServingError


def refuse_unknown(message: Message) -> None:
    """Raise UNSUPPORTED_FEATURE for the first unknown field, by its number and its message's type.

    A client that sets it expects an effect. Between our own services unknown fields are left
    alone, since those are not renewed at once.
    """
    for each in _parts(message):
        unknown = UnknownFieldSet(each)
        if len(unknown):
            raise ServingError(
                Reason.UNSUPPORTED_FEATURE,
                f"{each.DESCRIPTOR.name}: has a field {unknown[0].field_number} that is unknown"
                " here; leave it out, or update the router",
            )


def _parts(message: Message) -> Iterator[Message]:
    """A message and all that it holds, maps apart."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else (value,):
            yield from _parts(each)
