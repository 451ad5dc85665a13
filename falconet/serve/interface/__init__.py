"""The gRPC interface that this server answers, and its compilation."""
