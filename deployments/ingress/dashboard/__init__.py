"""The web page and `GET /cluster`."""
