"""The application with encoders and language models that compute nothing, and tell which weights they would use.

Everything between them is the application's own: `build` is what a configuration file names in place of `build_app`.
A model is a folder; its weights are the bytes of WEIGHTS in it. Files beside them decide about encoders by the order in
which those of one `encoder.fused_kernels` start: `odd-<fusion>-<number>` gives the encoder numerics of its own,
`hold-<fusion>-<number>` keeps it from starting.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from configs.schema import AppConfig
from deployments.common import messages
from deployments.common.messages import (
    NOT_STORED,
    Accepted,
    EncodeTimings,
    HttpRequest,
    ImageJob,
    ItemReference,
    NotEncoded,
    Piece,
    ResponseHead,
    SharedEmbedding,
)
from deployments.common.replica_errors import OtherIdentityError
from deployments.ingress.deployment import Ingress
from deployments.routing.affinity import Call
from deployments.routing.replica_identity import encoder_metadata, llm_metadata, wait_for_rollout_turn
from deployments.transfer.unix_socket import host_id
from encoder.images.identity import EncoderIdentity, tower_fingerprint
from encoder.item_header import ItemHeader
from tests.unit.deployments.samples import RULES, VISION

NAME = f"{__name__}:build"
WEIGHTS = "model.safetensors"
PROTOCOL = "x-protocol"
"""Name of the file, and of the header with the version of the ingress that answered."""
ENCODE_S = 0.002
JSON = [(b"content-type", b"application/json")]


def build(args: dict[str, Any]) -> object:
    from deployments import app

    vars(app).update(EncoderReplica=FakeEncoder, LLM=FakeLLM, Ingress=VersionedIngress)
    return app.build_app(args)


def weights_of(model: str) -> str:
    return hashlib.sha256((Path(model) / WEIGHTS).read_bytes()).hexdigest()


def protocol_of(model: str) -> int:
    file = Path(model) / PROTOCOL
    return int(file.read_text()) if file.exists() else messages.PROTOCOL_VERSION


def mark_of(weights: str, protocol: int) -> int:
    """Stands for the rows of embeddings made with the weights by an encoder of this version."""
    return int(weights[:4], 16) + (protocol << 16)


def started(model: str, fusion: str) -> int:
    """How many encoders of this fusion started before this one."""
    for number in itertools.count():
        try:
            (Path(model) / f"started-{fusion}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


class VersionedIngress(Ingress):
    def __init__(self, config: AppConfig, *handles: Any, **named: Any) -> None:
        messages.PROTOCOL_VERSION = protocol_of(config.model)
        super().__init__(config, *handles, **named)

    async def __call__(self, request: Request) -> Response:
        response = await super().__call__(request)
        response.headers[PROTOCOL] = str(messages.PROTOCOL_VERSION)
        return response


class FakeEncoder:
    def __init__(self, config: AppConfig) -> None:
        messages.PROTOCOL_VERSION = protocol_of(config.model)
        fusion = str(config.encoder.fused_kernels)
        number, folder = started(config.model, fusion), Path(config.model)
        self._held_by = folder / f"hold-{fusion}-{number}"
        forward = "odd" if (folder / f"odd-{fusion}-{number}").exists() else fusion
        self._identity = EncoderIdentity(weights_of(config.model), VISION, "float32", RULES, forward, image_token_id=7)

    async def record_replica_metadata(self) -> dict[str, str]:
        while self._held_by.exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.05)
        await wait_for_rollout_turn("Encoder", self._identity.tower)
        return encoder_metadata(self._identity, host_id())

    async def encode(self, job: ImageJob) -> SharedEmbedding:
        """The mark of its weights stands for the embedding's rows."""
        if job.identity != self._identity.fingerprint:
            raise OtherIdentityError
        await asyncio.sleep(ENCODE_S)
        shape = mark_of(self._identity.weights, messages.PROTOCOL_VERSION), VISION.width
        return SharedEmbedding(job.digest, "float32", shape, EncodeTimings(0, 0, 0, time.time(), False), NOT_STORED)


class FakeLLM:
    """Answers with the mark of its own weights, and those of the embeddings that it got."""

    def __init__(self, config: AppConfig) -> None:
        messages.PROTOCOL_VERSION = protocol_of(config.model)
        self._weights = weights_of(config.model)

    def record_replica_metadata(self) -> dict[str, str]:
        return llm_metadata(tower_fingerprint(self._weights, VISION, RULES), host_id())

    async def handle(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference],
        headers: Sequence[ItemHeader],
        encodings: Sequence[Any],
        call: Call,
    ) -> AsyncIterator[Piece]:
        marks = []
        for number, encoding in enumerate(encodings):
            try:
                image: SharedEmbedding = await encoding
            except Exception:
                yield NotEncoded((number,))
                return
            marks.append(image.num_tokens)
        yield Accepted()
        body = json.dumps({"llm": mark_of(self._weights, messages.PROTOCOL_VERSION), "images": marks}).encode()
        yield ResponseHead(200, list(JSON), body, complete=True)
