"""The requests that are put both to the application and to vLLM alone."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.serve import pictures
from tests.serve.pictures import data_url, encoded, picture, url
from tests.video_files import Clip, frame_list
from training.conversations import Conversation as SceneConversation
from training.held_out import questions

Body = dict[str, Any]

MODEL = "tiny"
GREEDY: Body = {
    "temperature": 0,
    "max_tokens": 12,
    "logprobs": True,
    "top_logprobs": 5,
    "return_token_ids": True,
    # A random model likes tokens that are parts of a character, and all of these have the same text.
    "return_tokens_as_token_ids": True,
}
SEVERAL_BLOCKS = "Tell me of every shape, its colour and its place. " * 8
"""Words for more than one block of vLLM's prefix cache, of 128 tokens each."""
COMPLETED: Body = {"temperature": 0, "max_tokens": 12, "logprobs": 3, "return_tokens_as_token_ids": True}
WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,  # else the arguments may be any JSON
        "description": "Look up the weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Conversation:
    """A named request body for /v1/chat/completions."""

    name: str
    body: Body

    @property
    def has_images(self) -> bool:
        return "image_url" in str(self.body["messages"]) or self.has_videos

    @property
    def has_videos(self) -> bool:
        return "video_url" in str(self.body["messages"])

    def __str__(self) -> str:
        return self.name


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def image(image_url: str, **fields: str) -> Body:
    return {"type": "image_url", "image_url": {"url": image_url, **fields}}


def video(file: bytes) -> Body:
    """`file`: or the text of a list of frames."""
    frames = file.startswith(b"/9j/")
    data = (file if frames else base64.b64encode(file)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/{'jpeg' if frames else 'mp4'};base64,{data}"}}


def user(*content: Body) -> Body:
    return {"role": "user", "content": list(content)}


def chat(*messages: Body, **fields: object) -> Body:
    """A greedy request for 12 tokens, with log-probabilities and token ids."""
    return {"model": MODEL, "messages": list(messages), **GREEDY, **fields}


def about(image_url: str, words: str = "What is in the picture?", **fields: object) -> Body:
    """A question about one picture."""
    return chat(user(image(image_url), text(words)), **fields)


def screenshots(num_turns: int, *, edited_turn: int | None = None) -> Body:
    """A turn of an agent that sends a screenshot with each, and all earlier ones again. After each there are words for
    more than a block of vLLM's prefix cache. `edited_turn`: the answer before it is another."""
    messages: list[Body] = []
    for turn in range(1, num_turns + 1):
        if turn > 1:
            said = f"Step {turn - 1}" + (", once more." if turn == edited_turn else ".")
            messages.append({"role": "assistant", "content": said})
        messages.append(user(image(url(700 + turn, 1280, 800, "JPEG")), text(SEVERAL_BLOCKS)))
    return chat(*messages, mm_processor_kwargs={"max_pixels": 256 * 256})


AGENT_TURNS = 20
AGENT: dict[str, Body] = {
    "turn 2": screenshots(2),
    f"turn {AGENT_TURNS}": screenshots(AGENT_TURNS),
    "edited": screenshots(AGENT_TURNS, edited_turn=11),
}
"""What vLLM alone is asked of an agent's conversation."""


def _one_image() -> dict[str, Body]:
    return {
        "png of odd size": about(url(1, 97, 61)),
        "jpeg": about(url(2, 120, 90, "JPEG", quality=80)),
        "webp": about(url(3, 75, 131, "WEBP", quality=70)),
        "gif": about(url(4, 64, 64, "GIF")),
        "bmp": about(url(5, 66, 50, "BMP")),
        "rgba": about(data_url(encoded(pictures.with_alpha(6, 90, 70)))),
        "palette with a transparent colour": about(data_url(encoded(pictures.with_palette(8, 70, 90), transparency=0))),
        "greyscale": about(data_url(encoded(picture(9, 84, 56).convert("L")))),
        "greyscale with alpha": about(data_url(encoded(pictures.with_alpha(10, 60, 88).convert("LA")))),
        "16-bit greyscale": about(data_url(encoded(picture(12, 64, 80).convert("I;16")))),
        "cmyk jpeg": about(data_url(encoded(picture(13, 88, 88).convert("CMYK"), "JPEG"), "JPEG")),
        "turned by exif": about(data_url(pictures.rotated_by_exif(14, 140, 60, 6), "JPEG")),
        "mirrored by exif": about(data_url(pictures.rotated_by_exif(15, 60, 100, 5), "JPEG")),
        "two by three pixels": about(url(16, 2, 3)),
        "long and narrow": about(url(17, 700, 20)),
        "shrunk to the checkpoint's maximum": about(url(18, 1300, 1000, "JPEG")),
        "no words": chat(user(image(url(19)))),
        "words before the picture": chat(user(text("Look at this:"), image(url(20)))),
        "detail high": chat(user(image(url(21, 150, 100), detail="high"), text("Describe it."))),
    }


def _several_images() -> dict[str, Body]:
    first, second, third = url(30, 97, 61), url(31, 64, 128, "JPEG"), url(32, 200, 120, "WEBP")
    return {
        "three images with words between": chat(
            user(
                text("One:"), image(first), text("two:"), image(second), text("three:"), image(third), text("Compare.")
            )
        ),
        "an image repeated": chat(user(image(first), image(first), image(second), image(first), text("Which differ?"))),
        "eight images": chat(user(*(image(url(40 + seed, 40 + 9 * seed, 90)) for seed in range(8)), text("Count."))),
        "images in several messages": chat(
            {"role": "system", "content": "Answer briefly."},
            user(text("First picture."), image(second)),
            {"role": "assistant", "content": "I see."},
            user(image(third), text("And this one?")),
        ),
        "several turns": chat(
            user(image(first), text("How many shapes?")),
            {"role": "assistant", "content": "Seven, most of them round."},
            {"role": "user", "content": "Which colour is the largest one?"},
            {"role": "assistant", "content": [text("Green.")]},
            {"role": "user", "content": "Are you sure?"},
        ),
        "an earlier turn's image again": chat(
            user(image(first), text("How many shapes?")),
            {"role": "assistant", "content": "Seven."},
            user(image(first), image(second), text("And now?")),
        ),
    }


def _passed_on() -> dict[str, Body]:
    """Fields that the ingress does not know: what vLLM makes of them shows that they arrived."""
    asked = url(50, 90, 90)
    weather: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 60}
    return {
        "several answers": about(asked, n=2, seed=7, temperature=0.9),
        "seed": about(asked, seed=11, temperature=1.0, top_p=0.9, top_k=50),
        "stop token": about(asked, stop_token_ids=list(range(0, 512, 3)), max_tokens=40),
        "penalties": about(asked, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
        "logit bias": about(asked, logit_bias={"300": 100}),
        "twenty alternatives": about(asked, top_logprobs=20, return_tokens_as_token_ids=False),
        "log-probabilities of the prompt": about(asked, prompt_logprobs=2, max_tokens=3),
        "no log-probabilities": about(asked, logprobs=False, top_logprobs=None),
        "json schema": about(
            asked,
            max_tokens=60,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": WEATHER["function"]["parameters"]},
            },
        ),
        "tool required": about(asked, **weather, tool_choice="required"),
        "tool named": about(asked, **weather, tool_choice={"type": "function", "function": {"name": "get_weather"}}),
        "tool left to the model": about(asked, tools=[WEATHER], tool_choice="auto"),
        "a tool's answer": chat(
            user(image(asked), text("What is the weather there?")),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"unit":"kelvin"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "280"},
            tools=[WEATHER],
        ),
        "an answer begun": chat(
            user(image(asked), text("Describe it.")),
            {"role": "assistant", "content": "The picture shows"},
            continue_final_message=True,
            add_generation_prompt=False,
        ),
    }


def _pixel_bounds() -> dict[str, Body]:
    large, small = url(60, 500, 400, "JPEG"), url(61, 70, 60)
    return {
        "max_pixels": about(large, mm_processor_kwargs={"max_pixels": 120 * 120}),
        "min_pixels": about(small, mm_processor_kwargs={"min_pixels": 200 * 200}),
        "both bounds, two images": chat(
            user(image(large), image(small), text("Compare.")),
            mm_processor_kwargs={"min_pixels": 100 * 100, "max_pixels": 150 * 150},
        ),
    }


def _videos() -> dict[str, Body]:
    clip, webm = Clip(24, Fraction(8), seed=1), Clip(30, Fraction(10), 160, 120, container="webm", seed=2)
    asked, first = text("What happens?"), video(clip.encode())
    return {
        "a video": chat(user(first, asked)),
        "a video at seven frames a second": chat(user(first, asked), media_io_kwargs={"video": {"fps": 7}}),
        "a video and an image": chat(user(image(url(62, 90, 70)), video(webm.encode()), text("Is it there?"))),
        "two videos of several turns": chat(
            user(text("First:"), video(webm.encode()), asked),
            {"role": "assistant", "content": "A square moves."},
            user(video(Clip(9, Fraction(3), 70, 130, container="gif").encode()), first, text("And here?")),
        ),
        "a list of frames": chat(user(video(frame_list(Clip(7, seed=3).pictures())), asked)),
    }


def _text_only() -> dict[str, Body]:
    return {
        "text": chat({"role": "user", "content": "Hello! How are you today?"}),
        "text in parts": chat(user(text("Hello!"), text("What can you do?"))),
        "text, several turns": chat(
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": "Rain."},
            {"role": "user", "content": "And tomorrow?"},
        ),
        "text with a tool": chat({"role": "user", "content": "The weather?"}, tools=[WEATHER], tool_choice="auto"),
    }


def _conversations() -> list[Conversation]:
    groups = (_one_image(), _several_images(), _passed_on(), _pixel_bounds(), _videos(), _text_only())
    return [Conversation(name, body) for group in groups for name, body in group.items()]


CONVERSATIONS = _conversations()
# With one image each, and such as the application with narrow limits takes.
SMALL_CONVERSATIONS = [Conversation(name, body) for name, body in _one_image().items() if "maximum" not in name]

# Requests without images to the other routes: path and body.
TEXT_REQUESTS: dict[str, tuple[str, Body]] = {
    "completion": ("/v1/completions", {"model": MODEL, "prompt": "Once upon a time", **COMPLETED}),
    "completions of two prompts": ("/v1/completions", {"model": MODEL, "prompt": ["One", "Two"], **COMPLETED}),
    "completion with echo": ("/v1/completions", {"model": MODEL, "prompt": "Once", **COMPLETED, "echo": True}),
    "completion of token ids": ("/v1/completions", {"model": MODEL, "prompt": [65, 66, 67], **COMPLETED}),
    "completions with a seed": (
        "/v1/completions",
        {"model": MODEL, "prompt": "Once", **COMPLETED, "temperature": 0.8, "seed": 5, "n": 2},
    ),
    "response": ("/v1/responses", {"model": MODEL, "input": "Hello!", "temperature": 0, "max_output_tokens": 12}),
    "response to messages": (
        "/v1/responses",
        {
            "model": MODEL,
            "instructions": "Be terse.",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}],
            "temperature": 0,
            "max_output_tokens": 12,
        },
    ),
    "tokens of a prompt": ("/tokenize", {"model": MODEL, "prompt": "The weather in Paris", "return_token_strs": True}),
    "text of tokens": ("/detokenize", {"model": MODEL, "tokens": [300, 65, 66, 410]}),
}


def input_image(image_url: str) -> Body:
    """An image of a Responses request."""
    return {"type": "input_image", "image_url": image_url, "detail": "auto"}


def source_image(image_url: str) -> Body:
    """An image in Anthropic's format; base64 for a `data:` URL."""
    media_type, found, data = image_url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": media_type, "data": data} if found else {"type": "url", "url": image_url}
    return {"type": "image", "source": source}


def _image_requests() -> dict[str, tuple[str, Body]]:
    first, second = url(140, 97, 61), url(141, 64, 90, "JPEG")
    response: Body = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    message: Body = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    words = {"type": "input_text", "text": "What is it?"}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [words, input_image(second)]}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("Here."), source_image(second)]}
    tool_call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = user(text("What is it?"), source_image(first))
    seen = {"messages": [asked, {"role": "assistant", "content": [use]}, user(result, source_image(first))]}
    on_chat = [user(image(first)), {"role": "assistant", "content": None, "tool_calls": [tool_call]}]
    tool = {"role": "tool", "tool_call_id": "a", "content": [text("Here."), image(second)]}
    return {
        "response to images": ("/v1/responses", {**response, "input": [user(input_image(first), words)]}),
        "response to a tool's image": ("/v1/responses", {**response, "input": [user(words), call, output]}),
        "message with an image": ("/v1/messages", {**message, "messages": [asked]}),
        "message with a tool's image": ("/v1/messages", {**message, **seen}),
        "tokens of a message": ("/v1/messages/count_tokens", {"model": MODEL, **seen}),
        "chat with a tool's image": ("/v1/chat/completions", chat(*on_chat, tool)),
    }


IMAGE_REQUESTS = _image_requests()
"""Requests with images to the routes of other formats, and in messages of tools: path and body."""


def held_out_questions() -> list[SceneConversation]:
    """One of every family, about pictures that fit into the limits of the application `tight`."""
    return questions(1, 2000)
