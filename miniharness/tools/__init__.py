"""Any MCP server's tools: what is declared of them, and one durable call."""
