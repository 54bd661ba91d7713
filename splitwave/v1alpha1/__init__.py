"""Generated from proto/splitwave/v1alpha1; `make gen` writes it."""
