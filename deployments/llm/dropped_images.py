"""Finds media that a chat template leaves out of the prompt: vLLM answers such a request with status 500.

For example, templates of the Qwen-VL family use only the text of a `system` message.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from deployments.common.api_error import RESPONSES_PATH, ApiError, conversation_field
from deployments.common.messages import HttpRequest
from deployments.llm import asgi_client

if TYPE_CHECKING:
    from deployments.vllm.compat import AsgiApp

TOKENIZE = "/tokenize"
"""vLLM's route that applies the template and inserts the images into the prompt, without the engine."""
NO_IMAGE = {"type": "text", "text": ""}
MEDIA = ("image_url", "audio_url", "video_url")


async def find_dropped_images(app: AsgiApp, request: HttpRequest) -> ApiError | None:
    """Returns a 400 that names the first message whose images are not in the prompt; None if all images are in it, or
    if they are in Anthropic's format, which has images in messages of users only.

    vLLM reports only that there are fewer placeholders than images. So the chat is tokenized once for each message with
    images, without the images of the other messages. The request's references must be valid.
    """
    body = json.loads(request.body)
    field = conversation_field(request.path)
    if request.path == RESPONSES_PATH:
        body = {"messages": [_chat_message(item) for item in body["input"]]}
    messages = body["messages"]
    without_images = [_without_images(message) for message in messages]
    for number, message in enumerate(messages):
        if message == without_images[number]:
            continue
        tokenize_body = {**body, "messages": [*without_images[:number], message, *without_images[number + 1 :]]}
        if (
            await _status(app, dataclasses.replace(request, path=TOKENIZE, body=json.dumps(tokenize_body).encode()))
            == 500
        ):
            role = message.get("role")
            message_text = (
                f"{field}[{number}]: the model's chat template takes no such media from messages of role {role!r}"
            )
            return ApiError(400, message_text, param=field, code="image_not_in_prompt")
    return None


async def _status(app: AsgiApp, request: HttpRequest) -> int:
    async with aclosing(asgi_client.call(app, request)) as messages:
        return int((await anext(messages))["status"])


def _chat_message(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item of a Responses request as a message of a chat, of which only role and images matter."""
    parts = item.get("content", item.get("output"))
    urls = [part["image_url"] for part in parts if "image_url" in part] if isinstance(parts, list) else []
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": item.get("role", "tool"), "content": images or "-"}


def _without_images(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [NO_IMAGE if isinstance(part, dict) and part.get("type") in MEDIA else part for part in content]
    return {**message, "content": parts}
