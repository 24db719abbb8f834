"""The /v1/infer API: text, tensor steps and their sessions, over HTTP and WebSocket."""
