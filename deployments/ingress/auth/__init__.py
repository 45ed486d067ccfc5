"""API keys, rate limits, and the addresses on which the server may listen."""
