"""Every row of the table of routes is as the table says, and nothing that vLLM itself serves is open beside it."""

from __future__ import annotations

import httpx
import pytest

from deployments.common.api_error import ANTHROPIC_PATHS
from deployments.ingress.http.routes import ROUTES, Route, open_routes
from tests.serve import pictures
from tests.serve.asking import TIMEOUT_S, metric, post
from tests.serve.conversations import MODEL, about
from tests.serve.errors import error_of
from tests.serve.vllm_alone import Reference

pytestmark = pytest.mark.slow

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
UNKNOWN = (
    "/page",
    "/page/",
    "/nothing",
    "/v1",
    "/v1/chat",
    "/v1/chat/completions/",
    "//v1/models",
    "/v1/models/tiny",
    "/redoc",
)


def request(method: str, url: str) -> httpx.Response:
    return httpx.request(method, url, json={"model": MODEL} if method == "POST" else None, timeout=TIMEOUT_S)


@pytest.mark.parametrize("path", UNKNOWN)
def test_what_is_not_in_the_table_is_not_found(qwen3: str, path: str) -> None:
    error_of(request("POST", qwen3 + path), 404)


def test_what_vllm_alone_serves_is_open_only_where_the_table_says_so(qwen3: str, reference: Reference) -> None:
    assert "/v1/chat/completions" in reference.paths
    closed = [path for path in reference.paths if not open_routes(path)]
    assert {"/invocations", "/v1/responses/{response_id}/cancel", "/scale_elastic_ep"} <= set(closed)
    for path in closed:
        for method in reference.paths[path]:
            error_of(request(method, qwen3 + path.replace("{", "").replace("}", "")), 404)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{' '.join(route.methods)} {route.path}")
def test_other_methods_are_not_allowed(qwen3: str, route: Route) -> None:
    allowed = {method for row in open_routes(route.path) for method in row.methods}
    for method in sorted(set(METHODS) - allowed):
        response = request(method, qwen3 + route.path.replace("{id}", "resp_1").replace("{file}", "main.js"))
        if method == "HEAD":  # such an answer has no body
            assert response.status_code == 405
        elif route.path in ANTHROPIC_PATHS:
            assert (response.status_code, response.json()["type"]) == (405, "error")
        else:
            assert error_of(response, 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_health(base_url: str, method: str, path: str) -> None:
    assert httpx.request(method, base_url + path, timeout=TIMEOUT_S).status_code == 200


def test_version_and_load(qwen3: str) -> None:
    import vllm

    assert httpx.get(qwen3 + "/version", timeout=TIMEOUT_S).json() == {"version": vllm.__version__}
    assert isinstance(httpx.get(qwen3 + "/load", timeout=TIMEOUT_S).json()["server_load"], int)


def test_metrics_count_what_was_asked(qwen3: str) -> None:
    before = metric(qwen3, "vllm:request_success_total")
    body = about(pictures.url(210))
    assert post(qwen3, "/v1/chat/completions", body).status_code == 200
    assert metric(qwen3, "vllm:request_success_total") == before + 1
    assert httpx.get(qwen3 + "/metrics", timeout=TIMEOUT_S).headers["content-type"].startswith("text/plain")


def test_the_description_names_only_what_is_open(qwen3: str) -> None:
    described = httpx.get(qwen3 + "/openapi.json", timeout=TIMEOUT_S).json()["paths"]
    assert {"/v1/chat/completions", "/v1/models", "/tokenize"} <= set(described)
    for path, operations in described.items():
        allowed = {method for row in open_routes(path) for method in row.methods}
        assert {method.upper() for method in operations} <= allowed, path


def test_the_documentation_page_leads_to_the_description(qwen3: str) -> None:
    page = httpx.get(qwen3 + "/docs", timeout=TIMEOUT_S)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    prefix = httpx.URL(qwen3).path
    assert f"'{prefix}/openapi.json'" in page.text


def test_text_to_tokens_and_back(base_url: str) -> None:
    prompt = "Which of the pictures has more circles?"
    tokens = post(base_url, "/tokenize", {"model": MODEL, "prompt": prompt}).json()
    assert tokens["count"] == len(tokens["tokens"])
    back = post(base_url, "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()
    assert back == {"prompt": prompt}


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
def test_images_where_only_text_is_served(qwen3: str, path: str) -> None:
    image_url = pictures.url(211)
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": image_url}]
    message = {"role": "user", "content": content}
    for body in ({"input": [message]}, {"messages": about(image_url)["messages"]}):
        error = error_of(post(qwen3, path, {"model": MODEL, "prompt": "x", "tokens": [1], **body}), 501)
        assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
def test_an_unknown_model_is_not_found(qwen3: str, path: str) -> None:
    field = {"/v1/chat/completions": "messages", "/v1/responses": "input"}.get(path, "prompt")
    body = {"model": "gpt-none", field: [{"role": "user", "content": "Hi"}] if field == "messages" else "Hi"}
    assert "gpt-none" in error_of(post(qwen3, path, body), 404)["message"]
