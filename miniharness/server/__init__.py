"""For authors of MCP servers: tools that can be retried and looked up after any crash (docs/recoverable-tools.md)."""
