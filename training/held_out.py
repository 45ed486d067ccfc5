"""Questions about held-out scenes, who may be asked them, and what is right.

They follow from a family and a seed, so that everything that answers them answers the same ones.
"""

from __future__ import annotations

import base64
import io
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from training.clips import Clip
from training.conversations import TEST_FAMILIES, Conversation, messages, single_question
from training.scenes import HELD_OUT, draw

MAX_ANSWER_TOKENS = 96
# Of a question's smallest picture: upper bounds of its shorter side, in pixels.
_SIDES = (96, 160, 256, 384, 512)


def questions(each: int, seed: int, families: Sequence[str] = TEST_FAMILIES) -> list[Conversation]:
    """`each` questions of every family; `seed` counts from the first held-out one.

    Ordered by length, so that what is answered together ends together.

    Raises:
        ValueError: there would be none.
    """
    if each < 1:
        raise ValueError(f"the number of questions per family is {each}; it must be at least 1")
    made = [single_question(HELD_OUT + seed + number, family) for family in families for number in range(each)]
    return sorted(made, key=_length)


def _length(one: Conversation) -> tuple[bool, int]:
    turn = one.turns[-1]
    scenes = (*turn.scenes, *([turn.clip.scene] if turn.clip else []))
    return turn.family.startswith(("describe", "what happens")), sum(scene.width * scene.height for scene in scenes)


def pictures(conversation: Conversation) -> list[Image.Image]:
    """Of all turns, in order."""
    return [draw(scene) for turn in conversation.turns for scene in turn.scenes]


def chat_body(conversation: Conversation, model: str) -> dict[str, Any]:
    """What OpenAI's chat route takes, to be answered greedily; pictures as PNG, which loses nothing, clips as MP4."""
    urls = {
        "image": iter([data_url(picture) for picture in pictures(conversation)]),
        "video": iter([video_url(turn.clip) for turn in conversation.turns if turn.clip]),
    }
    listed = messages(conversation)
    for message in listed:
        if not isinstance(message["content"], str):
            message["content"] = [
                {"type": f"{kind}_url", f"{kind}_url": {"url": next(urls[kind])}} if kind in urls else part
                for part in message["content"]
                for kind in (part["type"],)
            ]
    return {"model": model, "messages": listed, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}


def data_url(picture: Image.Image) -> str:
    """A PNG in an address."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@cache
def video_url(clip: Clip) -> str:
    """An MP4 in an address, of all frames of the clip.

    Cached: x264 once made two files of the same frames, and all who are asked a question must get the same file.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=clip.fps, options={"crf": "12"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = clip.scene.width, clip.scene.height, "yuv420p"
        for index in range(clip.num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(clip.frame(index)), format="rgb24")))
        container.mux(stream.encode(None))
    return f"data:video/mp4;base64,{base64.b64encode(file.getvalue()).decode()}"


def is_right(answer: str, expected: str) -> bool:
    """Word for word; the parts of a list in any order."""
    return _parts(answer) == _parts(expected)


def _parts(text: str) -> list[list[str]]:
    sentences = re.sub(" (on an?|shows) ", r", \1, ", text.strip().lower()).split(".")
    return [sorted(one.strip().replace(" and ", ", ").split(", ")) for one in sentences if one.strip()]


def score(asked: Sequence[Conversation], given: Sequence[str]) -> dict[str, Any]:
    """Accuracy by family and by the shorter side of the smallest picture, with its count, and all wrong answers."""
    families: dict[str, list[bool]] = defaultdict(list)
    sides: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for one, answer in zip(asked, given, strict=True):
        turn = one.turns[-1]
        right = is_right(answer, turn.answer)
        families[turn.family].append(right)
        if turn.scenes:
            side = min(min(scene.width, scene.height) for scene in turn.scenes)
            sides[f"up to {next(bound for bound in _SIDES if side <= bound)}"].append(right)
        if not right:
            wrong.append({"family": turn.family, "question": turn.question, "answer": answer, "right": turn.answer})
    every = [right for rights in families.values() for right in rights]
    return {
        "questions": len(every),
        "accuracy": round(sum(every) / len(every), 4),
        "families": {name: share(families[name]) for name in TEST_FAMILIES if name in families},
        "shorter_side": {name: [share(rights), len(rights)] for name, rights in sorted(sides.items())},
        "wrong": wrong,
    }


def share(rights: Sequence[bool]) -> float:
    """Of those that are right."""
    return round(sum(rights) / len(rights), 4)


def differences(asked: Sequence[Conversation], given: dict[str, Sequence[str]]) -> list[dict[str, Any]]:
    """The questions that not all of `given`, by name, answered alike, to the letter."""
    return [
        {
            "family": one.turns[-1].family,
            "question": one.turns[-1].question,
            "right": one.turns[-1].answer,
            "answers": dict(zip(given, answers, strict=True)),
        }
        for one, *answers in zip(asked, *given.values(), strict=True)
        if len(set(answers)) > 1
    ]
