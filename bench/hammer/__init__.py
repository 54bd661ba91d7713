"""The ragged hammer: graphs of several sizes over one transport, on two ranks that drift apart."""
