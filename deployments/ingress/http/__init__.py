"""Route table, and the parsing of an HTTP request within limits."""
