"""Prepared items of the tests in this folder."""

from __future__ import annotations

from deployments.vllm.preparer import VllmInputs
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate

WIDTH = 4
"""Columns of an embedding."""


def item(num_embeds: int, content: str = "", modality: str = "image") -> VllmInputs:
    update = PromptUpdate("replace", (7,), (PromptRun(8, 1, False), PromptRun(7, num_embeds, True)))
    header = ItemHeader(content.ljust(64, "0"), modality, num_embeds, (update,), b"metadata")
    return VllmInputs(header, content.encode())
