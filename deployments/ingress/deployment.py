"""The Ingress deployment: OpenAI's API over HTTP. It sends images to encoders and the request, with references instead
of the images, to vLLM.

Embeddings do not pass through the ingress: language models fetch them from encoders by reference.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any

from cachetools import LRUCache, cached
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.schema import AppConfig
from deployments.common import names
from deployments.common.api_error import (
    ANTHROPIC_PATHS,
    RESPONSES_PATH,
    ApiError,
    Shed,
    anthropic_error,
    error_head_and_body,
)
from deployments.common.messages import MODEL_SAMPLING, HttpRequest, ImageJob, ResponseHead
from deployments.common.model_path import default_sampling
from deployments.common.ray_private import running_replicas, serve_host
from deployments.common.replica_errors import IdentityGoneError
from deployments.ingress.admission import Admission, Visit
from deployments.ingress.attempt import Attempt, http_response, respond, split_videos
from deployments.ingress.auth.gate import AccessControl, Client
from deployments.ingress.dashboard.cluster_view import ClusterView
from deployments.ingress.dashboard.static_files import HEADERS, Page
from deployments.ingress.failures import MAX_ATTEMPTS
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http import routes
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.deadline import TIMEOUT_HEADER, Deadline
from deployments.ingress.http.held_bytes import Held, HeldBytes
from deployments.ingress.http.request_body import OffLoop, read_body
from deployments.ingress.image_jobs import (
    EngineRequest,
    Measure,
    build_engine_request,
    fetch_images,
    measure_image,
)
from deployments.ingress.replica_client import Replicas
from deployments.ingress.responses.client import StoredResponses
from deployments.routing.replica_identity import version_metadata, wait_for_rollout_turn
from deployments.telemetry import tracing
from deployments.telemetry.metrics import AdmissionMetrics, Counter, Counters, ErrorLogCounter, Histogram, Histograms
from deployments.telemetry.server_timing import format_metric
from deployments.telemetry.tracing import Stage

# Headers that vLLM's application reads. Others (cookies, credentials, …) are not forwarded.
FORWARDED_HEADERS = (
    b"content-type",
    b"accept",
    b"x-request-id",
    b"x-vllm-priority",
    b"traceparent",
    b"tracestate",
)

JSON_HEAD = ResponseHead(200, [(b"content-type", b"application/json")])


class Ingress:
    """Serve calls an instance with every HTTP request under the application's route prefix."""

    def __init__(
        self,
        config: AppConfig,
        llm: DeploymentHandle[Any],
        encoder: DeploymentHandle[Any] | None = None,
        store: DeploymentHandle[Any] | None = None,
    ) -> None:
        """`encoder`: None if language models run the tower themselves; then they publish the identity of the tower.
        `store`: None if responses are not stored."""
        self._limits = config.ingress
        self._sampling = default_sampling(config)
        self._llm = llm
        self._access = AccessControl(self._limits, host=serve_host())
        ErrorLogCounter.install(Counters())
        self._admission_metrics = AdmissionMetrics()
        self._histograms = Histograms()
        self._admission = Admission(self._limits, self._admission_metrics)
        self._replicas = Replicas(encoder or llm, llm, self._limits, self._admission.retry_after_s)
        self._held_bytes = HeldBytes(
            self._limits.max_bytes_held,
            self._admission_metrics,
            max_fetched_bytes=self._limits.fetch.max_bytes_per_request,
            retry_after_s=self._admission.retry_after_s,
        )
        self._off_loop = OffLoop()
        self._responses = StoredResponses(store, self._limits, self._off_loop)
        num_remembered = self._limits.embedding_directory_entries
        remembered = cached(LRUCache(num_remembered), key=lambda digest, *_: digest, lock=Lock())
        self._measure: Measure = remembered(measure_image)
        self._fetcher = MediaFetcher(self._limits.fetch, max_bytes=self._limits.max_image_bytes)
        self._page = Page(enabled=self._limits.web_ui)
        self._cluster = ClusterView(encoder, llm, self._admission)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Returns the version of the messages, which Serve sends to routers. Waits for its turn in a rollout."""
        await wait_for_rollout_turn(names.INGRESS)
        return version_metadata()

    async def __call__(self, request: Request) -> Response:
        response = await self._respond(request)
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if response.status_code < 400 or path not in ANTHROPIC_PATHS:
            return response
        headers = [header for header in response.raw_headers if header[0] != b"content-type"]
        head = ResponseHead(response.status_code, [*headers, *JSON_HEAD.headers])
        return http_response(head, anthropic_error(head.status, bytes(response.body)))

    async def _respond(self, request: Request) -> Response:
        arrived = asyncio.get_running_loop().time()
        try:
            header = request.headers.get(TIMEOUT_HEADER)
            deadline = Deadline.from_header(header, arrived=arrived, max_s=self._limits.request_timeout_s)
            async with asyncio.timeout_at(deadline.at):
                with tracing.continue_trace(request.headers):
                    return await self._dispatch(request, deadline)
        except TimeoutError:
            return http_response(*error_head_and_body(deadline.error()))
        except ApiError as refused:  # a local variable would keep the request's files until cycles are collected
            if refused.status == 429:
                self._admission_metrics.shed(Shed.RATE_LIMIT, 0)
            return http_response(*error_head_and_body(refused))

    async def _dispatch(self, request: Request, deadline: Deadline) -> Response:
        root_path = request.scope.get("root_path", "")
        path = request.scope["path"].removeprefix(root_path) or "/"
        client = await self._access.admit(request, path)
        route = routes.open_route(request.method, path, management=self._access.is_management_open)
        if route.service is routes.Service.PAGE:
            return self._page.response(request.scope["path"].removeprefix(root_path), root_path=root_path)
        if route.service is routes.Service.HEALTH:
            return self._health()
        if route.path == routes.CLUSTER:
            return JSONResponse(await self._cluster.get(), headers=HEADERS)
        if route.service is routes.Service.STORED:
            return await self._responses.answer(request, path, client.salt)
        inner = HttpRequest(
            method=request.method,
            path=path,
            query_string=request.scope["query_string"],
            headers=[(name, value) for name, value in request.scope["headers"] if name in FORWARDED_HEADERS],
            body=b"",
            root_path=root_path,
        )
        with self._held_bytes.request() as held:
            chunks = await read_body(request, max_bytes=self._limits.max_body_bytes, held=held)
            if path == "/openapi.json":
                return await self._openapi(inner, deadline)
            if not held.num_bytes:
                with self._visit(deadline) as visit:
                    return await respond(
                        Attempt(EngineRequest(inner), self._replicas, visit, deadline, self._histograms)
                    )
            body_format = route.body_format if route.service is routes.Service.IMAGES else None
            turn = await self._responses.start(chunks, client.salt, held) if path == RESPONSES_PATH else None
            parse = partial(ChatRequest.parse, chunks, self._limits, body_format=body_format, salt=client.salt)
            chat = await self._off_loop.run(held.num_bytes, parse)
            if chat.sampling == MODEL_SAMPLING:  # fps and num_frames bound each other: one of them replaces both
                chat.sampling = self._sampling
            held.resize(chat.num_bytes)
            keep = None
            if turn is not None and chat.store:
                chat.set_response_id(turn.id)
                keep = partial(self._responses.keep, turn, partial(chat.own_items, turn.num_earlier), chat.num_bytes)
            inner = dataclasses.replace(inner, cache_salt=chat.cache_salt)
            if chat.images:
                with self._visit(deadline) as visit:
                    response = await self._dispatch_with_images(chat, inner, client, visit, deadline, held)
            else:
                body, conversation = await self._off_loop.run(held.num_bytes, chat.to_json)
                text = EngineRequest(dataclasses.replace(inner, body=body), conversation=conversation)
                del chat, body
                with self._visit(deadline) as visit:
                    response = await respond(Attempt(text, self._replicas, visit, deadline, self._histograms))
            return response if keep is None else await keep(response)

    def _health(self) -> Response:
        """Answers a load balancer's health check without a call to a replica. Raises ApiError 503 if no language model
        is running."""
        if running_replicas(self._llm):
            return Response()
        retry_after_s = self._limits.retry_after_s
        raise ApiError(503, "the model is not up; try again", code="unavailable", retry_after_s=retry_after_s)

    async def _dispatch_with_images(
        self,
        chat: ChatRequest,
        inner: HttpRequest,
        client: Client,
        visit: Visit,
        deadline: Deadline,
        held: Held,
    ) -> Response:
        """Fetches the images, waits for admission and responds. Retries if the last encoder of the identity ends."""
        started = time.perf_counter()
        charge = partial(self._charge, client, visit, chat.images[0].param)
        is_charged, asked, num_jobs = False, set[int](), 0
        for _ in range(MAX_ATTEMPTS):
            identity = await self._replicas.identity.get()
            chat.images = await fetch_images(
                chat.images, self._fetcher, self._limits, client=client.name, count=held.add_fetched
            )
            prepare = partial(build_engine_request, chat, inner, identity, self._limits, client.salt, self._measure)
            request = await self._off_loop.run(held.num_bytes, prepare)
            try:
                if plans := await self._replicas.plan_videos(request.jobs, client.name):
                    request = split_videos(request, plans, self._limits)
            except IdentityGoneError:
                self._replicas.counts.add(Counter.REQUEST_RETRIES)
                continue
            stages = format_metric("fetch", fetch_ms := (time.perf_counter() - started) * 1e3)
            if not is_charged:
                self._histograms.observe(Histogram.FETCH_SECONDS, fetch_ms / 1e3)
                tracing.record_span(Stage.FETCH, fetch_ms / 1e3, attributes={"vitray.images": len(chat.images)})
                requested = time.perf_counter()
                await charge(request.new_jobs, visual_tokens=request.visual_tokens)
                is_charged = True
                stages += ", " + format_metric("admission", admission_ms := (time.perf_counter() - requested) * 1e3)
                self._histograms.observe(Histogram.ADMISSION_SECONDS, admission_ms / 1e3)
                tracing.record_span(Stage.ADMISSION, admission_ms / 1e3)
            try:
                if len(request.jobs) != num_jobs:  # the new encoders cut videos differently
                    asked, num_jobs = set(), len(request.jobs)
                attempt = Attempt(
                    request, self._replicas, visit, deadline, self._histograms, stages, charge=charge, asked=asked
                )
                return await respond(attempt)
            except IdentityGoneError:
                self._replicas.counts.add(Counter.REQUEST_RETRIES)
        changing = "the encoders are changing their weights; try again"
        raise ApiError(503, changing, code="overloaded", retry_after_s=self._limits.retry_after_s)

    async def _charge(
        self, client: Client, visit: Visit, param: str, jobs: Sequence[ImageJob], visual_tokens: int | None = None
    ) -> None:
        """Waits for the admission of the images, which are in the field `param` of the body. `visual_tokens` count for
        the rate limit, by default those of the images."""
        tokens = sum(job.num_tokens for job in jobs)
        visit.request(tokens, len(jobs), param)
        await self._access.charge_visual_tokens(client, tokens if visual_tokens is None else visual_tokens)
        await visit.wait_until_admitted()

    async def _openapi(self, inner: HttpRequest, deadline: Deadline) -> Response:
        """Returns vLLM's OpenAPI document, limited to the routes that are open here."""
        with self._visit(deadline) as visit:
            attempt = Attempt(EngineRequest(inner), self._replicas, visit, deadline, self._histograms)
            described = await attempt.response()
        if described.status_code != 200:
            return described
        return http_response(JSON_HEAD, routes.filter_openapi(bytes(described.body)))

    def _visit(self, deadline: Deadline) -> AbstractContextManager[Visit]:
        """Counts the request as waiting for a language model."""
        return self._admission.visit(lambda: deadline.has_passed(asyncio.get_running_loop().time()))
