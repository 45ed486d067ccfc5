"""Decoding of `data:` URLs, and the API errors of images that cannot be loaded."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote_to_bytes

import pybase64

from deployments.common.api_error import ApiError

MAX_ESCAPES = 100_000
"""Percent signs in a `data:` URL. A million block the event loop for seconds; images are usually sent in base64."""


class MediaError(ValueError):
    """An image could not be loaded. The message is safe to show to the client."""


class MediaTooLargeError(MediaError):
    """An image has more bytes than the limit."""


@contextmanager
def raise_as_api_error(label: str, param: str) -> Iterator[None]:
    """Turns a MediaError into an ApiError that names the image: 413 for MediaTooLargeError, else 400."""
    try:
        yield
    except MediaTooLargeError as error:
        raise ApiError(413, f"{label}: {error}", param=param, code="image_too_large") from error
    except MediaError as error:
        raise ApiError(400, f"{label}: {error}", param=param, code="invalid_image_url") from error


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """Returns the bytes of a `data:` URL (RFC 2397), in base64 with or without padding, or percent-encoded.

    Raises:
        MediaError: the URL is malformed.
        MediaTooLargeError: it has more than `max_bytes`, estimated before decoding.
    """
    comma = url.find(",")
    if comma < 0:
        raise MediaError("the data: URL has no comma before its data")
    in_base64 = url[len("data:") : comma].rpartition(";")[2].strip().lower() == "base64"
    try:
        payload = url[comma + 1 :].encode()
    except UnicodeError as error:
        raise MediaError("the data: URL is not valid Unicode") from error
    num_escapes = payload.count(b"%") if b"%" in payload else 0  # the search for one is many times faster
    if num_escapes > MAX_ESCAPES:
        raise MediaTooLargeError(f"the data: URL has {num_escapes} percent signs, the limit is {MAX_ESCAPES}")
    num_bytes = len(payload) - 2 * num_escapes  # a percent sign and two digits are one byte
    if in_base64:
        num_bytes = num_bytes * 3 // 4 - 2  # padding takes at most 2
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the image has {num_bytes} bytes or more, the limit is {max_bytes}")
    data = unquote_to_bytes(payload) if num_escapes else payload
    if in_base64:
        return decode_base64(data, max_bytes=max_bytes)
    return _check_size(data, max_bytes)


def decode_base64(payload: bytes | memoryview, *, max_bytes: int) -> bytes:
    """Decodes the part after the comma, with or without padding. Raises as `decode_data_url` does."""
    num_bytes = len(payload) * 3 // 4 - 2  # padding takes at most 2
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the image has {num_bytes} bytes or more, the limit is {max_bytes}")
    missing = -len(payload) % 4
    try:
        data = pybase64.b64decode(bytes(payload) + b"=" * missing if missing else payload, validate=True)
    except binascii.Error as error:
        raise MediaError("the data: URL is not valid base64") from error
    return _check_size(data, max_bytes)


def _check_size(data: bytes, max_bytes: int) -> bytes:
    """Returns `data`. Raises MediaError if it is empty, MediaTooLargeError over `max_bytes`."""
    if len(data) > max_bytes:
        raise MediaTooLargeError(f"the image has {len(data)} bytes, the limit is {max_bytes}")
    if not data:
        raise MediaError("the data: URL is empty")
    return data
