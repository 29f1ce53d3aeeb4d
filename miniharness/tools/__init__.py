"""Any MCP server's tools: what is declared of them, what may be called, and one durable call."""
