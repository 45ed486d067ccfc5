"""Who may ask: API keys, the bounds on a request's headers, quotas, and the routes for the operator.

It tells who a request is from, and by what salt that client's caches are apart from others'. It must not know what is
asked, nor how it is answered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.requests import Request

from configs.schema import DoorConfig
from deployments import proxy_bounds
from deployments.api_keys import ApiKeys
from deployments.errors import ApiError
from deployments.listening import is_loopback, refused_to_strangers
from deployments.routes import CLUSTER, PAGE_FILES

logger = logging.getLogger("ray.serve")

MAX_HEADERS = 100
MAX_TENANT_CHARACTERS = 256
WITHOUT_A_KEY = ("/health", "/ping", *PAGE_FILES)
"""What load balancers ask; the answer says that there is a server and no more. And the page, which is the same for
everybody and asks its user for a key."""


NOT_COUNTED = (*PAGE_FILES, CLUSTER)
"""What a page that is open asks again and again, and what costs next to nothing; quotas are for the rest."""


class OpenDoorError(RuntimeError):
    """The server would answer strangers, and nobody said that it may."""


@dataclass(frozen=True)
class Client:
    """Whom a request is from."""

    name: str
    """Of its key and its tenant, else its address; quotas and fetches are counted by it."""
    salt: str | None
    """64 hex characters that keep its caches apart; None where nothing tells clients apart."""


class Door:
    """One for each ingress replica."""

    def __init__(self, config: DoorConfig, *, host: str | None) -> None:
        """`host` is the address that Serve listens on, None where that is not known.

        Raises:
            OpenDoorError: neither keys nor loopback, and `authentication` is not "none". KeysError: keys that cannot be
                read.
        """
        self._config = config
        self._on_loopback = is_loopback(host)
        self._keys: ApiKeys | None = None
        if config.api_keys_file is not None or config.api_keys_variable is not None:
            self._keys = ApiKeys(file=config.api_keys_file, variable=config.api_keys_variable)
        if refusal := refused_to_strangers(config, host):
            raise OpenDoorError(refusal)
        if not self._on_loopback and os.environ.get(proxy_bounds.VARIABLE) != proxy_bounds.IMPORT_PATH:
            logger.warning(
                "%s is not %s: Serve's HTTP proxy takes headers of any size, and waits for them without end",
                *(proxy_bounds.VARIABLE, proxy_bounds.IMPORT_PATH),
            )
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    @property
    def management_is_open(self) -> bool:
        wanted = self._config.management_routes
        return wanted == "open" or (wanted == "auto" and self._on_loopback)

    async def admit(self, request: Request, path: str) -> Client:
        """Lets a request in, and counts it, unless it is the page's own.

        Raises:
            ApiError: 431 for its headers, 401 without a valid key, 403 from a web page on a server without keys, 429
                over its quota.
        """
        self._check_headers(request)
        key = self._key_name(request, path)
        tenant = self._tenant(request)
        named = [part for part in (key, tenant) if part is not None]
        address = request.client.host if request.client is not None else ""
        client = Client("/".join(named) or address, _salt(key, tenant) if named else None)
        if path not in NOT_COUNTED:
            await self._count("requests", self._config.requests_per_minute, client, 1)
        return client

    async def charge_visual_tokens(self, client: Client, number: int) -> None:
        """Raises ApiError 429 where the client's quota has no room for so many."""
        await self._count("visual tokens", self._config.visual_tokens_per_minute, client, number)

    def _check_headers(self, request: Request) -> None:
        headers = request.scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        num_bytes += len(request.scope["path"]) + len(request.scope["query_string"])
        limit = self._config.max_header_bytes
        if num_bytes > limit or len(headers) > MAX_HEADERS:
            told = f"the request has {len(headers)} headers of {num_bytes} bytes"
            raise ApiError(431, f"{told}, the limits are {MAX_HEADERS} and {limit}", code="headers_too_large")

    def _key_name(self, request: Request, path: str) -> str | None:
        if self._keys is None:
            if self._config.authentication == "auto":
                _refuse_web_pages(request)
            return None
        if path in WITHOUT_A_KEY:
            return None
        given = request.headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        name = self._keys.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ApiError(401, "no valid API key: send one as Authorization: Bearer KEY", code="invalid_api_key")
        return name

    def _tenant(self, request: Request) -> str | None:
        if self._config.tenant_header is None:
            return None
        given = request.headers.getlist(self._config.tenant_header)
        if not given:
            return None
        if len(given) > 1 or len(given[0]) > MAX_TENANT_CHARACTERS:
            limit = f"one value of at most {MAX_TENANT_CHARACTERS} characters"
            raise ApiError(400, f"header {self._config.tenant_header} must have {limit}")
        return given[0]

    async def _count(self, what: str, per_minute: int | None, client: Client, number: int) -> None:
        if per_minute is None or number == 0:
            return
        quota = RateLimitItemPerMinute(per_minute, namespace=what)
        if await self._limiter.hit(quota, client.name, cost=number):
            return
        if number > per_minute:
            raise ApiError(
                429, f"the request has {number} {what}, the quota is {per_minute} a minute", code="over_quota"
            )
        left_s = (await self._limiter.get_window_stats(quota, client.name)).reset_time
        raise ApiError(
            429,
            f"over the quota of {per_minute} {what} a minute; try again",
            code="over_quota",
            retry_after_s=_seconds_until(left_s),
        )


def _seconds_until(moment_s: float) -> int:
    return max(1, min(60, math.ceil(moment_s - time.time())))


def _salt(key: str | None, tenant: str | None) -> str:
    """Not the key itself: it goes into digests and to vLLM."""
    return hashlib.sha256(json.dumps(["vitray tenant", key, tenant]).encode()).hexdigest()


def _refuse_web_pages(request: Request) -> None:
    """Without keys, whatever runs on this machine may ask; a page in its browser, from somewhere else, may not.

    A page can send requests to loopback, and by changing the address of its own name it could read the answers too.
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
