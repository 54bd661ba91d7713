"""gRPC options of both ends, in one place so that they match.

A client that pings more often than the server permits is cut off with
GOAWAY "too_many_pings" (gRPC A8), so the two keepalive intervals stand together.
"""

from typing import Final

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest message that either end receives; what we send stays far below."""
KEEPALIVE_S: Final = 10
"""A silent peer is asked for a sign of life this often."""
KEEPALIVE_TIMEOUT_S: Final = 5
"""And is given up after this."""
_PING_FLOOR_S: Final = KEEPALIVE_S // 2
"""More frequent pings than this are an attack."""

_BOTH: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # Without it a ping's answer is awaited for 60 s, whatever the line above says (grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # A session may be silent for hours.
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_BOTH,
    ("grpc.enable_retries", 0),  # Attempts are visible in the router, never hidden here.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take: on a busy host the peer's answer can be late. A
    # refused one is tried again after the backoff all the same.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # One connection a channel, so one reset is one reset.
)
"""For every channel that we open."""

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_FLOOR_S * 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_FLOOR_S * 1000),
    ("grpc.so_reuseport", 0),  # A taken port is an error, not a second server beside ours.
)
"""For every server that we start."""
