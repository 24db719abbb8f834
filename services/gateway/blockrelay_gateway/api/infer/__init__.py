"""/v1/infer: text, tensors, sessions; over HTTP and WebSocket."""
