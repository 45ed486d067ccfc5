"""The front door: OpenAI's routes over HTTP. Images go to encoders, the request with keys in their places to vLLM.

Embeddings never pass through here: the language model fetches the encoders' answers, by reference. This module
must not know how images are decoded or encoded, nor anything of vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from configs.schema import AppConfig
from deployments import body_bounds, chat_images, routes, tracing
from deployments.admission import Admission, AdmissionBounds, OverloadedError, Shed, Visit
from deployments.answering import respond, response
from deployments.body import read_body
from deployments.cluster_view import ClusterView
from deployments.deadline import TIMEOUT_HEADER, Deadline
from deployments.door import Client, Door
from deployments.errors import ApiError, error_head_and_body
from deployments.failures import OutdatedError, ReplicaLostError
from deployments.image_jobs import request_images
from deployments.json_body import json_object, written
from deployments.listening import serve_host
from deployments.media import MediaFetcher
from deployments.media_keys import new_key
from deployments.metrics import AdmissionMetrics, Distribution, Distributions
from deployments.page_routes import Page, json_answer
from deployments.proportion import IN_FLIGHT_TOKENS, LINE_TOKENS, UNACCEPTED_REQUESTS, IngressLoad
from deployments.replica_errors import IdentityChangedError
from deployments.replicas import Answer, Replicas
from deployments.server_timing import metric
from deployments.tracing import Stage
from deployments.wire import HttpRequest, ImageJob, ImagePlace, ResponseHead

# What vLLM's application reads; everything else (cookies, credentials, …) stays here.
PASSED_HEADERS = (b"content-type", b"accept", b"x-request-id", b"traceparent", b"tracestate")

# Whose bodies vLLM takes a salt for its prefix cache from.
SALTED_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

MAX_TRIES = 5
"""Of a request at which replicas are lost: one that ends every replica it comes to must not end them all."""

BYTES_A_TOKEN = 4
"""About so many of a request's body for each token of text; images' tokens are known."""

FIRST_WAIT_S = 0.05
"""Before a request is tried again; each further time twice as long."""

JSON_HEAD = ResponseHead(200, [(b"content-type", b"application/json")])

T = TypeVar("T")


class Ingress:
    """Serve calls it with every HTTP request below the application's route prefix."""

    def __init__(self, config: AppConfig, encoder: DeploymentHandle[Any], llm: DeploymentHandle[Any]) -> None:
        self._limits = config.ingress
        self._door = Door(self._limits.door, host=serve_host())
        self._admission_metrics = AdmissionMetrics()
        self._times = Distributions()
        self._admission = Admission(AdmissionBounds.of(self._limits), self._admission_metrics)
        self._replicas = Replicas(
            encoder,
            llm,
            retry_after_s=self._limits.retry_after_s,
            overloaded_retry_s=self._admission.retry_after_s,
            hedge_after_s=self._limits.hedge_after_s,
            fallback_after_s=config.llm.fallback_after_s if config.llm.fallback == "local" else None,
            max_whereabouts=self._limits.max_whereabouts,
            by_grpc=self._limits.by_grpc,
        )
        self._fetcher = MediaFetcher(self._limits.fetch, max_bytes=self._limits.max_image_bytes)
        self._page = Page(there=self._limits.page)
        self._cluster = ClusterView(encoder, llm, self._load)

    def _load(self) -> IngressLoad:
        line = self._admission
        return IngressLoad(float(line.tokens_waiting), float(line.tokens_in_flight), float(line.requests))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve takes to the application's autoscaling policy, every few seconds, where this scales too."""
        load = self._load()
        return {
            LINE_TOKENS: load.line_tokens,
            IN_FLIGHT_TOKENS: load.in_flight_tokens,
            UNACCEPTED_REQUESTS: load.unaccepted_requests,
        }

    async def __call__(self, request: Request) -> Response:
        arrived = asyncio.get_running_loop().time()
        deadline = Deadline.of(None, arrived=arrived, most_s=self._limits.request_timeout_s)
        try:
            asked = request.headers.get(TIMEOUT_HEADER)
            deadline = Deadline.of(asked, arrived=arrived, most_s=self._limits.request_timeout_s)
            async with asyncio.timeout_at(deadline.at):
                with tracing.continued(request.headers):
                    return await self._answer(request, deadline)
        except TimeoutError:
            error = deadline.error()
        except OverloadedError as full:
            error = ApiError(503, str(full), code="overloaded", retry_after_s=full.retry_after_s)
        except ApiError as refused:
            error = refused
            if refused.status == 429:
                self._admission_metrics.shed(Shed.QUOTA, 0)
        return response(*error_head_and_body(error))

    async def _answer(self, request: Request, deadline: Deadline) -> Response:
        root_path = request.scope.get("root_path", "")
        path = request.scope["path"].removeprefix(root_path) or "/"
        client = await self._door.admit(request, path)
        route = routes.open_route(request.method, path, management=self._door.management_is_open)
        if route.service is routes.Service.PAGE:
            return response(*self._page.answer(request.scope["path"].removeprefix(root_path), root_path=root_path))
        if route.path == routes.CLUSTER:
            return response(*json_answer(await self._cluster.now()))
        inner = HttpRequest(
            method=request.method,
            path=path,
            query_string=request.scope["query_string"],
            headers=[(name, value) for name, value in request.scope["headers"] if name in PASSED_HEADERS],
            body=await read_body(request, max_bytes=self._limits.max_body_bytes),
            root_path=root_path,
            joined=True,
        )
        if path == "/openapi.json":
            return await self._openapi(inner, deadline)
        if inner.body:
            body = json_object(inner.body)
            chat_images.refuse_fields(body)
            body_bounds.check(body, max_answers=self._limits.max_answers_per_request)
            if client.salt is not None and route.path in SALTED_ROUTES:
                chat_images.put_salt(body, client.salt)
            if route.service is routes.Service.IMAGES:
                if parts := chat_images.image_parts(body):
                    with self._visit(deadline) as visit:
                        return await self._answer_with_images(inner, body, parts, client, visit, deadline)
            elif chat_images.holds_media([body.get("input"), body.get("messages")]):
                unsupported = "only text is supported on this route; send images to /v1/chat/completions"
                raise ApiError(501, unsupported, code="images_not_supported")
            # Never as it came: what another parser makes of doubled names is not what was checked here.
            inner = dataclasses.replace(inner, body=written(body))
        key = chat_images.conversation(body) if inner.body else None
        with self._visit(deadline) as visit:
            return await self._answered(inner, [], [], key, visit, deadline)

    async def _answer_with_images(
        self,
        inner: HttpRequest,
        body: chat_images.Body,
        parts: Sequence[chat_images.ImagePart],
        client: Client,
        visit: Visit,
        deadline: Deadline,
    ) -> Response:
        """Encodes and forwards in its turn; once more where the encoder changed between its identity and the job."""
        started = time.perf_counter()
        bounds = chat_images.pop_bounds(body)
        for last_try in (False, True):
            identity = await self._again(lambda _: self._replicas.identity.get())
            images = await request_images(
                parts, bounds, identity, self._fetcher, self._limits, client=client.name, salt=client.salt
            )
            stages = metric("fetch", fetch_ms := (time.perf_counter() - started) * 1e3)
            if not last_try:
                self._times.add(Distribution.FETCH_MS, fetch_ms)
                tracing.stage(Stage.FETCH, fetch_ms / 1e3, attributes={"vitray.images": len(parts)})
                asked = time.perf_counter()
                visit.ask(sum(job.num_tokens for job in images.jobs), len(images.jobs))
                await self._door.charge_visual_tokens(client, images.num_tokens)
                await visit.turn()
                stages += ", " + metric("admission", admission_ms := (time.perf_counter() - asked) * 1e3)
                self._times.add(Distribution.ADMISSION_MS, admission_ms)
                tracing.stage(Stage.ADMISSION, admission_ms / 1e3)
            places = [
                ImagePlace(new_key(), new_key(), job, part.label, images.grids[job])
                for part, job in zip(parts, images.job_of_part, strict=True)
            ]
            for part, place in zip(parts, places, strict=True):
                chat_images.put_key(part, place, images.jobs[place.image].digest)
            request = dataclasses.replace(inner, body=written(body))
            key = chat_images.conversation(body)
            try:
                return await self._answered(request, places, images.jobs, key, visit, deadline, stages)
            except IdentityChangedError:
                self._replicas.identity.forget()
                if last_try:
                    break
        changing = "the encoders are changing their weights; try again"
        raise ApiError(503, changing, code="overloaded", retry_after_s=self._limits.retry_after_s)

    async def _answered(
        self,
        request: HttpRequest,
        places: Sequence[ImagePlace],
        jobs: Sequence[ImageJob],
        conversation: str | None,
        visit: Visit,
        deadline: Deadline,
        stages: str | None = None,
    ) -> Response:
        """The images encoded and the request answered; again and elsewhere where a replica is lost at it.

        What a replica that lives has encoded is in its cache, and is not encoded again.
        """

        visual_tokens = sum(jobs[place.image].num_tokens for place in places)
        prompt_tokens = visual_tokens + len(request.body) // BYTES_A_TOKEN

        async def once(attempt: int) -> Response:
            await visit.again()
            try:
                return await tried(attempt)
            except OutdatedError:
                return await tried(attempt, ask=True)

        async def tried(attempt: int, *, ask: bool = False) -> Response:
            seen = [None] * len(jobs) if ask or attempt else self._replicas.seen(jobs, conversation)
            encodings = [self._replicas.encode(job, attempt, seen=at) for job, at in zip(jobs, seen, strict=True)]

            def begin() -> Awaitable[Answer]:
                return self._replicas.answer(
                    request, places, encodings, conversation=conversation, attempt=attempt, prompt_tokens=prompt_tokens
                )

            async def begin_in_time() -> Answer:
                return await self._replicas.hurried(await begin(), jobs, encodings, attempt=attempt, again=begin)

            return await respond(
                self._replicas,
                begin_in_time,
                encodings,
                accepted=visit.accepted,
                conversation=conversation,
                deadline=deadline,
                times=self._times,
                stages=stages,
            )

        return await self._again(once)

    async def _again(self, work: Callable[[int], Awaitable[T]]) -> T:
        """The result of `work`, which is called with how often it was called before."""
        for attempt in range(MAX_TRIES - 1):
            try:
                return await work(attempt)
            except ReplicaLostError:
                self._replicas.trying_again()
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        return await work(MAX_TRIES - 1)

    async def _openapi(self, inner: HttpRequest, deadline: Deadline) -> Response:
        """vLLM's own description, of the routes that are open here."""
        with self._visit(deadline) as visit:
            described = await respond(
                self._replicas,
                lambda: self._replicas.answer(inner, [], []),
                [],
                accepted=visit.accepted,
                deadline=deadline,
                times=self._times,
            )
        if described.status_code != 200:
            return described
        return response(JSON_HEAD, routes.described(bytes(described.body)))

    def _visit(self, deadline: Deadline) -> AbstractContextManager[Visit]:
        """From here on the request counts as waiting for a language model."""
        return self._admission.visit(lambda: deadline.passed(asyncio.get_running_loop().time()))
