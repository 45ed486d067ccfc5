"""Asks a running application about picture files with the official `openai` client, and prints the streamed answer.

python examples/ask_openai.py "What is in the picture?" picture.jpg [another.png …]
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

import openai


def picture_part(file: Path) -> dict[str, Any]:
    """Returns a picture file as a message part with a data: URL."""
    kind = mimetypes.guess_type(file)[0] or "image/png"
    encoded = base64.b64encode(file.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{encoded}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running application about pictures.")
    parser.add_argument("question")
    parser.add_argument("pictures", nargs="*", type=Path, help="picture files; without any, the question is text only")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=arguments.url, api_key="none")  # the client requires a key, the server does not
    content = [*map(picture_part, arguments.pictures), {"type": "text", "text": arguments.question}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_tokens=arguments.max_tokens,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
