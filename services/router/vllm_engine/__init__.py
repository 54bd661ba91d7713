"""vLLM's public gRPC engine service, so that a split deployment looks like one engine."""
