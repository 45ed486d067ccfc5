"""Access control: API keys, limits of headers, rate limits and management routes.

It identifies the client of a request and the salt that separates the client's cache entries from others'.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.requests import Request

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.http_proxy import limits as proxy_bounds
from deployments.ingress.auth.api_keys import ApiKeys
from deployments.ingress.auth.bind_address import bind_refusal, is_loopback
from deployments.ingress.http.request_body import MAX_REQUEST_ID_CHARACTERS
from deployments.ingress.http.routes import CLUSTER, PAGE_FILES

logger = logging.getLogger("ray.serve")

MAX_HEADERS = 100
MAX_TENANT_CHARACTERS = 256
EXPIRE_EVERY_S = 5.0
"""Interval between two removals of expired counters. A removal takes time in proportion to the number of counters."""

PROBES = ("/health", "/ping")
"""Health checks of load balancers. They report only whether the server can answer."""

PATHS_WITHOUT_KEY = (*PROBES, *PAGE_FILES)
"""Paths that need no API key. The web page is the same for all users and asks for a key."""

PATHS_WITHOUT_RATE_LIMIT = (*PROBES, *PAGE_FILES, CLUSTER)
"""Paths without a rate limit: health checks and what an open web page polls. They cost almost nothing."""


class UnprotectedServerError(RuntimeError):
    """The server would be open to any client without an explicit setting."""


@dataclass(frozen=True)
class Client:
    """The client that sent a request."""

    name: str
    """Names of its key and its tenant, or its address if it has neither; rate limits and fetch slots are per name."""
    salt: str | None
    """64 hex characters that separate its cache entries; None without key and tenant."""


class AccessControl:
    """Access control of an ingress replica.

    client = await access.admit(request, path)
    await access.charge_visual_tokens(client, num_tokens)
    """

    def __init__(self, config: IngressConfig, *, host: str | None) -> None:
        """`host` is the address on which Serve listens, None if it is unknown.

        Raises:
            UnprotectedServerError: there are no keys, `host` is not loopback and `auth.mode` is "auto".
            KeysError: the keys cannot be read.
        """
        self._auth = auth = config.auth
        self._rate_limit = config.rate_limit
        self._max_header_bytes = config.max_header_bytes
        self._on_loopback = is_loopback(host)
        self._keys: ApiKeys | None = None
        if auth.api_keys_file is not None or auth.api_keys_env is not None:
            self._keys = ApiKeys(file=auth.api_keys_file, variable=auth.api_keys_env)
        if refusal := bind_refusal(auth, host):
            raise UnprotectedServerError(refusal)
        if not self._on_loopback and os.environ.get(proxy_bounds.VARIABLE) != proxy_bounds.IMPORT_PATH:
            logger.warning(
                "%s is not %s: Serve's HTTP proxy takes headers of any size, and waits for them without end",
                *(proxy_bounds.VARIABLE, proxy_bounds.IMPORT_PATH),
            )
        self._counters = MemoryStorage()
        self._expiry: asyncio.Task[None] | None = None
        self._limiter = SlidingWindowCounterRateLimiter(self._counters)

    @property
    def is_management_open(self) -> bool:
        setting = self._auth.management_routes
        return setting == "open" or (setting == "auto" and self._on_loopback)

    async def admit(self, request: Request, path: str) -> Client:
        """Returns the client of a request, after its headers, key and rate limit are checked.

        Raises:
            ApiError: 431 for too many or too large headers, 401 without a valid key, 403 for a request of another web
                page to a server without keys, 400 for an invalid tenant header, 429 over the rate limit.
        """
        self._check_headers(request)
        key = self._key_name(request, path)
        tenant = self._tenant(request)
        named = [part for part in (key, tenant) if part is not None]
        address = request.client.host if request.client is not None else ""
        client = Client("/".join(named) or address, _salt(key, tenant) if named else None)
        if path not in PATHS_WITHOUT_RATE_LIMIT:
            await self._charge("requests", self._rate_limit.requests_per_minute, client, 1)
        return client

    async def charge_visual_tokens(self, client: Client, num_tokens: int) -> None:
        """Counts `num_tokens` visual tokens. Raises ApiError 429 if they exceed the client's rate limit."""
        await self._charge("visual tokens", self._rate_limit.visual_tokens_per_minute, client, num_tokens)

    def _check_headers(self, request: Request) -> None:
        headers = request.scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        num_bytes += len(request.scope["path"]) + len(request.scope["query_string"])
        limit = self._max_header_bytes
        if num_bytes > limit or len(headers) > MAX_HEADERS:
            found = f"the request has {len(headers)} headers of {num_bytes} bytes"
            raise ApiError(431, f"{found}, the limits are {MAX_HEADERS} and {limit}", code="headers_too_large")
        length, limit = max(map(len, request.headers.getlist("x-request-id")), default=0), MAX_REQUEST_ID_CHARACTERS
        if length > limit:
            too_long = f"X-Request-Id has {length} characters, the limit is {limit}"
            raise ApiError(431, too_long, code="headers_too_large")

    def _key_name(self, request: Request, path: str) -> str | None:
        if self._keys is None:
            if self._auth.mode == "auto":
                _refuse_web_pages(request)
            return None
        if path in PATHS_WITHOUT_KEY:
            return None
        values = request.headers.getlist("authorization")
        if not values:  # Anthropic's clients
            values = [f"Bearer {key}" for key in request.headers.getlist("x-api-key")]
        scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        name = self._keys.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ApiError(401, "no valid API key: send one as Authorization: Bearer KEY", code="invalid_api_key")
        return name

    def _tenant(self, request: Request) -> str | None:
        if self._auth.tenant_header is None:
            return None
        values = request.headers.getlist(self._auth.tenant_header)
        if not values:
            return None
        if len(values) > 1 or len(values[0]) > MAX_TENANT_CHARACTERS:
            limit = f"one value of at most {MAX_TENANT_CHARACTERS} characters"
            raise ApiError(400, f"header {self._auth.tenant_header} must have {limit}")
        return values[0]

    async def _charge(self, what: str, per_minute: int | None, client: Client, number: int) -> None:
        if per_minute is None or number == 0:
            return
        quota = RateLimitItemPerMinute(per_minute, namespace=what)
        admitted = await self._limiter.hit(quota, client.name, cost=number)
        self._delay_next_expiry()
        if admitted:
            return
        if number > per_minute:
            raise ApiError(
                429, f"the request has {number} {what}, the quota is {per_minute} a minute", code="over_quota"
            )
        window = await self._counters.get_sliding_window(quota.key_for(client.name), quota.get_expiry())
        raise ApiError(
            429,
            f"over the quota of {per_minute} {what} a minute; try again",
            code="over_quota",
            retry_after_s=_seconds_until_room(quota, number, window),
        )

    def _delay_next_expiry(self) -> None:
        """Delays the storage's next removal of expired counters: it starts one at a request unless one still runs."""
        running = self._counters.timer
        if running is not None and running is not self._expiry:
            self._expiry = self._counters.timer = asyncio.create_task(_pause_after(running))


async def _pause_after(expiry: asyncio.Task[None]) -> None:
    await expiry
    await asyncio.sleep(EXPIRE_EVERY_S)


def _seconds_until_room(quota: RateLimitItem, number: int, window: tuple[int, float, int, float]) -> int:
    """Returns the seconds until `number` more are admitted, if nothing else is.

    What counts is the number of this minute, and of the last minute the share that the last 60 s contain. `window`: as
    of `MemoryStorage.get_sliding_window`, the last minute's number and this minute's, each with its time to live.
    """
    previous, _, current, expires_in_s = window
    minute_s = quota.get_expiry()
    left_s, room = expires_in_s - minute_s, quota.amount - number + 1  # numbers are rounded down
    if current < room:
        wait_s = left_s - minute_s * (room - current) / max(1, previous)
    else:
        wait_s = left_s + minute_s * (1 - room / current)
    return max(1, int(wait_s) + 1)


def _salt(key: str | None, tenant: str | None) -> str:
    """Returns a hash of the names of key and tenant. It becomes part of digests and is sent to vLLM."""
    return hashlib.sha256(json.dumps(["vitray tenant", key, tenant]).encode()).hexdigest()


def _refuse_web_pages(request: Request) -> None:
    """Raises ApiError 403 for requests of web pages of other origins, the only local clients refused without keys.

    Such a page can send requests to loopback, and by DNS rebinding it could also read the answers.
    """
    hosts = [f"//{host}" for host in request.headers.getlist("host")]
    for name in (*hosts, *request.headers.getlist("origin")):
        try:
            host = urlsplit(name).hostname or ""
        except ValueError:
            host = ""
        if not (is_loopback(host) or host.endswith(".localhost")):
            raise ApiError(
                403, "a server without API keys answers to localhost and 127.0.0.1 only", code="not_from_this_machine"
            )
