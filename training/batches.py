"""Conversations as packed tensors of fixed shapes: pictures and pairs of frames end to end, texts end to end, borders
beside them.

Pictures are prepared as the checkpoint's image processor prepares them, text as its chat template writes it; a test
compares both. Must not know of the model's weights or of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from training.clips import Clip
from training.conversations import Conversation, mixed_conversation
from training.scenes import draw
from training.scenes_model import MERGE, PATCH

UNIT = PATCH * MERGE
PATCH_VALUES = 3 * 2 * PATCH * PATCH
POSITION_SIDE = 16  # the learned positions are a table of 16 by 16


@dataclass(frozen=True)
class Limits:
    """Sizes of a batch's tensors, and the longest picture and conversation in it."""

    patches: int = 61440
    tokens: int = 65536
    labels: int = 11264
    pictures: int = 1536
    conversations: int = 512
    picture_patches: int = 1024
    conversation_tokens: int = 1280


@dataclass
class Sample:
    """One conversation: token ids with each picture's places filled, and what is to be learned of them."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)  # of each id: time, row, column
    learned: list[bool] = field(default_factory=list)  # of each id: is it part of an answer
    shown: list[bool] = field(default_factory=list)  # of each id: does it stand for a piece of a picture
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)  # [patches, 1536] each
    grids: list[tuple[int, int]] = field(default_factory=list)  # height, width in patches


def fitted(image: Image.Image) -> Image.Image:
    """Each side a multiple of what one token covers; for pictures of 64 to 512 pixels a side, whose area then fits."""
    width, height = (max(UNIT, round(side / UNIT) * UNIT) for side in image.size)
    return image if (width, height) == image.size else image.resize((width, height), Image.Resampling.BICUBIC)


def patches_of(first: Image.Image, second: Image.Image | None = None) -> NDArray[np.uint8]:
    """`[patches, 3 * 2 * 16 * 16]` of a picture, or of two frames, in the order of the model: the four patches of a
    token together."""
    pixels = np.stack([np.asarray(fitted(image)) for image in (first, second or first)])
    rows, columns = pixels.shape[1] // UNIT, pixels.shape[2] // UNIT
    cut = pixels.reshape(2, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    return np.ascontiguousarray(cut.transpose(1, 4, 2, 5, 7, 0, 3, 6)).reshape(-1, PATCH_VALUES)


class Encoder:
    """Turns conversations into samples, with the tokens of repeated texts remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = lru_cache(maxsize=1 << 16)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self._pads: dict[str, Any] = {name: tokenizer.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}

    def sample(self, conversation: Conversation, max_tokens: int) -> Sample:
        """Turns that do not fit are left out, the last ones first."""
        sample, position = Sample(), 0

        def text(words: str, learned: bool = False) -> None:
            nonlocal position
            ids = self._ids(words)
            sample.ids += ids
            sample.learned += [learned] * len(ids)
            sample.shown += [False] * len(ids)
            sample.positions += [(at, at, at) for at in range(position, position + len(ids))]
            position += len(ids)

        def picture(image: Image.Image, second: Image.Image | None = None) -> None:
            nonlocal position
            text("<|vision_start|>")
            fit = fitted(image)
            rows, columns = fit.height // UNIT, fit.width // UNIT
            sample.pictures.append(patches_of(fit, second))
            sample.grids.append((rows * MERGE, columns * MERGE))
            sample.ids += [self._pads["video" if second else "image"]] * (rows * columns)
            sample.learned += [False] * (rows * columns)
            sample.shown += [True] * (rows * columns)
            sample.positions += [
                (position, position + row, position + column) for row in range(rows) for column in range(columns)
            ]
            position += max(rows, columns)
            text("<|vision_end|>")

        def video(clip: Clip) -> None:
            frames = [clip.frame(index) for index in clip.padded]
            text("<|vision_start|>")  # transformers from 5.10 on replaces what is between these two
            for seconds, first, second in zip(clip.timestamps, frames[::2], frames[1::2], strict=True):
                text(f"<{seconds:.1f} seconds>")
                picture(first, second)
            text("<|vision_end|>")

        text(f"<|im_start|>system\n{conversation.system}<|im_end|>\n")
        for turn in conversation.turns:
            if len(sample.ids) > max_tokens - 150 and not turn.scenes and not turn.clip:
                break
            text("<|im_start|>user\n")
            if not turn.before:
                text(turn.question)
            if turn.clip:
                video(turn.clip)
            for scene in turn.scenes:
                picture(draw(scene))
            if turn.before:
                text(turn.question)
            text("<|im_end|>\n")
            text("<|im_start|>assistant\n")
            text(turn.answer, learned=True)
            text("<|im_end|>", learned=True)
            text("\n")
        return sample


@lru_cache(maxsize=1024)
def grid_geometry(height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Of a picture's patches in the model's order: row and column `[n, 2]`, and which four learned positions `[n, 4]`
    they lie between, with which weights `[n, 4]`."""
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    order = np.stack([rows, columns], -1).reshape(height // MERGE, MERGE, width // MERGE, MERGE, 2)
    places = order.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    at = places * (POSITION_SIDE - 1) / np.maximum(np.array([height, width]) - 1, 1)
    low = np.floor(at).astype(np.int64)
    part = (at - low).astype(np.float32)
    high = np.minimum(low + 1, POSITION_SIDE - 1)
    taps = [(y[:, 0] * POSITION_SIDE + x[:, 1]) for y in (low, high) for x in (low, high)]
    weights = [y * x for y in (1 - part[:, 0], part[:, 0]) for x in (1 - part[:, 1], part[:, 1])]
    return places, np.stack(taps, 1), np.stack(weights, 1).astype(np.float32)


Batch = dict[str, torch.Tensor]


def collate(samples: list[Sample], limits: Limits) -> Batch:
    """The samples end to end, padded to the limits; padding forms segments of its own."""
    pictures = [picture for sample in samples for picture in sample.pictures]
    geometry = [grid_geometry(*grid) for sample in samples for grid in sample.grids]
    ids = np.concatenate([sample.ids for sample in samples])
    learned = np.concatenate([sample.learned for sample in samples])
    places = np.flatnonzero(np.concatenate([sample.shown for sample in samples]))
    targets = np.flatnonzero(learned)
    fill = limits.tokens - 1  # always padding
    return {
        "patches": _padded(pictures, (limits.patches, PATCH_VALUES), np.uint8),
        "places": _padded([g[0] for g in geometry], (limits.patches, 2), np.int64),
        "taps": _padded([g[1] for g in geometry], (limits.patches, 4), np.int64),
        "tap_weights": _padded([g[2] for g in geometry], (limits.patches, 4), np.float32),
        "picture_borders": _borders(
            [len(picture) for picture in pictures], limits.patches, limits.pictures, limits.picture_patches
        ),
        "ids": _padded([ids], (limits.tokens,), np.int64),
        "positions": _padded([np.array(s.positions) for s in samples], (limits.tokens, 3), np.int64),
        "conversation_borders": _borders(
            [len(sample.ids) for sample in samples], limits.tokens, limits.conversations, limits.conversation_tokens
        ),
        "picture_places": _padded([places], (limits.patches // MERGE**2,), np.int64, fill),
        "label_places": _padded([targets - 1], (limits.labels,), np.int64),
        "labels": _padded([ids[targets]], (limits.labels,), np.int64, -100),
    }


def _padded(pieces: list[NDArray[Any]], shape: tuple[int, ...], dtype: type, fill: int = 0) -> torch.Tensor:
    whole: NDArray[Any] = np.full(shape, fill, dtype)
    start = 0
    for piece in pieces:
        whole[start : start + len(piece)] = piece
        start += len(piece)
    return torch.from_numpy(whole)


def _borders(lengths: list[int], total: int, most: int, longest: int) -> torch.Tensor:
    """Cumulative lengths, `[most + 1]`; the padding is cut into segments no longer than `longest`."""
    borders = np.full(most + 1, total, np.int32)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    borders[: len(ends)] = ends
    rest = np.arange(int(ends[-1]) + longest, total, longest)
    borders[len(ends) : len(ends) + len(rest)] = rest
    return torch.from_numpy(borders)


def batches(encoder: Encoder, seeds: Iterator[int], limits: Limits) -> Iterator[Batch]:
    """Packs conversation after conversation until one does not fit."""
    held: list[Sample] = []
    patches = tokens = labels = pictures = 0
    # Room for the segments that padding is cut into.
    most_pictures = limits.pictures - limits.patches // limits.picture_patches - 1
    most_conversations = limits.conversations - limits.tokens // limits.conversation_tokens - 1
    for seed in seeds:
        sample = encoder.sample(mixed_conversation(seed), limits.conversation_tokens)
        size = sum(len(picture) for picture in sample.pictures), len(sample.ids), sum(sample.learned)
        if size[1] > limits.conversation_tokens or size[0] > limits.patches or size[2] > limits.labels:
            continue
        if (
            patches + size[0] > limits.patches
            or tokens + size[1] > limits.tokens - 1
            or labels + size[2] > limits.labels
            or pictures + len(sample.pictures) > most_pictures
            or len(held) >= most_conversations
        ):
            yield collate(held, limits)
            held, patches, tokens, labels, pictures = [], 0, 0, 0, 0
        held.append(sample)
        patches, tokens, labels = patches + size[0], tokens + size[1], labels + size[2]
        pictures += len(sample.pictures)
