"""The tool side: how a Model Context Protocol server is started, spoken to and believed."""
