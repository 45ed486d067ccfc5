"""The table of routes against the routes of the installed vLLM: what is open exists, what is not listed is closed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from deployments.common.api_error import ANTHROPIC_PATHS
from deployments.ingress.http.image_parts import BodyFormat
from deployments.ingress.http.routes import CLUSTER, ROUTES, Route, Service, open_routes
from deployments.vllm import compat

OURS = {route for route in ROUTES if route.service in (Service.PAGE, Service.STORED) or route.path == CLUSTER}
HTTP_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def template(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"{[^}]*}", "{}", path)


@pytest.fixture(scope="module")
def vllm_app() -> FastAPI:
    """vLLM's application for a text-generating model."""
    app: FastAPI = compat.lookup("build_app")(compat.default_server_args(), ("generate",), None)
    return app


@pytest.fixture(scope="module")
def vllm_routes(vllm_app: FastAPI) -> set[tuple[str, str]]:
    """Method and path template of everything that vLLM's application serves for a text-generating model."""

    def found() -> Iterator[tuple[str, str]]:
        all_routes: Sequence[Any] = vllm_app.routes
        for route in all_routes:
            for method in getattr(route, "methods", None) or HTTP_METHODS:  # a mounted application takes any
                yield method, template(route.path)

    return set(found())


def test_every_open_route_is_one_of_vllms_or_the_pages(vllm_routes: set[tuple[str, str]]) -> None:
    open_here = {(method, template(route.path)) for route in ROUTES if route not in OURS for method in route.methods}
    assert open_here <= vllm_routes


def test_no_route_of_vllms_outside_the_table_can_be_reached(vllm_routes: set[tuple[str, str]]) -> None:
    """Several would fetch a URL by themselves or administrate the engine."""
    open_here = {(method, template(route.path)) for route in ROUTES for method in route.methods}
    for method, path in vllm_routes - open_here:
        rows = open_routes(path.replace("{}", "value"))
        assert not any(method in row.methods for row in rows), f"{method} {path} is open by {rows}"


def test_the_check_above_has_something_to_find(vllm_routes: set[tuple[str, str]]) -> None:
    closed = {path for _, path in vllm_routes} - {template(route.path) for route in ROUTES}
    assert {"/invocations", "/v1/responses/{}/cancel", "/scale_elastic_ep"} <= closed


def body_models(kind: object) -> Iterator[type[BaseModel]]:
    """Models of a body, which may be a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from body_models(part)


def test_vllm_reads_the_salt_on_every_open_route_that_generates(vllm_app: FastAPI) -> None:
    """Tenants share vLLM's prefix cache on a route whose request has no `cache_salt`; such a route must stay closed."""
    without_salt = {
        route.path
        for route in vllm_app.routes
        if isinstance(route, APIRoute) and route.body_field is not None and open_routes(route.path)
        for model in body_models(route.body_field.field_info.annotation)
        if "cache_salt" not in model.model_fields
    }
    assert without_salt == {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}, "only these run no model"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_row_is_open(route: Route) -> None:
    assert route in open_routes(route.path.replace("{id}", "resp_1").replace("{file}", "main.js"))


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/page",
        "/page/",
        "/page/a/b",
        "/v1",
        "/v1/models/",
        "//v1/models",
        "/V1/models",
        "/v1/models/x",
        "/v1/./models",
        "/v1/x/../models",
        "/v1/models%00",
        "/v1/responses/",
        "/v1/responses/resp_1/cancel",
        "/v1/messages/batches",
        "/v1/responses/a/b/cancel",
        "/v1/chat/completions/batch",
        "/metrics/",
        "/docs/oauth2-redirect",
        "/redoc",
    ],
)
def test_near_misses_are_closed(path: str) -> None:
    assert open_routes(path) == []


def test_a_parameter_is_one_part_of_the_path() -> None:
    assert [row.path for row in open_routes("/page/main.js")] == ["/page/{file}"]


@given(st.lists(st.sampled_from(["v1", "chat", "completions", "responses", "x", "", "..", "cancel"]), max_size=5))
def test_what_is_open_is_a_row_of_the_table(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    for row in open_routes(path):
        assert re.fullmatch(re.sub(r"\\{.*?\\}", "[^/]+", re.escape(row.path)), path)


def test_images_are_served_where_the_ingress_can_find_them() -> None:
    """Any other route would carry image URLs past the ingress."""
    assert {route.path: route.body_format for route in ROUTES if route.service is Service.IMAGES} == {
        "/v1/chat/completions": BodyFormat.CHAT,
        "/tokenize": BodyFormat.CHAT,
        "/v1/responses": BodyFormat.RESPONSES,
        "/v1/messages": BodyFormat.MESSAGES,
        "/v1/messages/count_tokens": BodyFormat.MESSAGES,
    }


def test_errors_of_anthropics_routes_have_its_format() -> None:
    assert {route.path for route in ROUTES if route.body_format is BodyFormat.MESSAGES} == set(ANTHROPIC_PATHS)


def test_the_table_has_every_route_once() -> None:
    paths = [route.path for route in ROUTES]
    assert len(set(paths)) == len(paths)
