"""The bytes of a `data:` URL. It must not know what is done with them, nor of other URLs."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

import pybase64

MAX_ESCAPES = 100_000
"""Percent signs in a `data:` URL. A million keeps the event loop busy for seconds; images are sent in base64."""


class MediaError(ValueError):
    """An image that could not be had; the message is safe to show to the client."""


class MediaTooLargeError(MediaError):
    """More bytes than the limit."""


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """The bytes of a `data:` URL (RFC 2397), base64 with or without its padding, or percent-encoded.

    Raises:
        MediaError: malformed. MediaTooLargeError: over `max_bytes`, decided before decoding.
    """
    comma = url.find(",")
    if comma < 0:
        raise MediaError("the data: URL has no comma before its data")
    in_base64 = url[len("data:") : comma].rpartition(";")[2].strip().lower() == "base64"
    try:
        payload = url[comma + 1 :].encode()
    except UnicodeError as error:
        raise MediaError("the data: URL is not valid Unicode") from error
    num_escapes = payload.count(b"%") if b"%" in payload else 0  # looking for one is many times as quick
    if num_escapes > MAX_ESCAPES:
        raise MediaTooLargeError(f"the data: URL has {num_escapes} percent signs, the limit is {MAX_ESCAPES}")
    num_bytes = len(payload) - 2 * num_escapes  # a percent sign and two digits are one byte
    if in_base64:
        num_bytes = num_bytes * 3 // 4 - 2  # the padding, at most
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the image has {num_bytes} bytes or more, the limit is {max_bytes}")
    data = unquote_to_bytes(payload) if num_escapes else payload
    if in_base64:
        try:
            data = pybase64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
        except binascii.Error as error:
            raise MediaError("the data: URL is not valid base64") from error
    if len(data) > max_bytes:
        raise MediaTooLargeError(f"the image has {len(data)} bytes, the limit is {max_bytes}")
    if not data:
        raise MediaError("the data: URL is empty")
    return data
