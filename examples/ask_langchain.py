"""Asks a running application about picture files through LangChain's chat model for OpenAI's API, with LangChain's own
messages.

Needs the extra `examples`.

python examples/ask_langchain.py "What is in the picture?" picture.jpg [another.png …]
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

import httpx
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


def picture_block(file: Path) -> dict[str, Any]:
    """Returns a picture file as one of LangChain's content blocks, which LangChain converts for the server."""
    kind = mimetypes.guess_type(file)[0] or "image/png"
    return {"type": "image", "base64": base64.b64encode(file.read_bytes()).decode(), "mime_type": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running application about pictures, through LangChain.")
    parser.add_argument("question")
    parser.add_argument("pictures", nargs="*", type=Path, help="picture files; without any, the question is text only")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()

    name = httpx.get(f"{arguments.url}/models").raise_for_status().json()["data"][0]["id"]
    model = ChatOpenAI(base_url=arguments.url, api_key="none", model=name, max_completion_tokens=arguments.max_tokens)
    messages = [
        SystemMessage("You are a helpful assistant."),
        HumanMessage([*map(picture_block, arguments.pictures), {"type": "text", "text": arguments.question}]),
    ]
    for chunk in model.stream(messages):
        print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
