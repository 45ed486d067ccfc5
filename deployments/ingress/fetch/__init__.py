"""Image bytes from data: and http(s) URLs, with an SSRF guard."""
