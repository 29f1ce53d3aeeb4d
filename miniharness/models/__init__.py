"""The model side: each adapter takes one Messages API request and returns one response, as plain JSON objects."""
