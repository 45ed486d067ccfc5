"""Early prefill: selects the requests that are submitted to vLLM before their embeddings are received.

vLLM's frontend then tokenizes the prompt, and its scheduler prefills it up to the first missing embedding
(`deployments/vllm/connector/partial_prefill_scheduler.py`) while encoders run. A request whose embeddings are not as
expected is aborted before its first token and resubmitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from deployments.common.messages import PREFIX_CACHE_ONLY, ImageReference, SharedEmbedding
from deployments.llm.embedding_receiver import Encoding
from deployments.llm.received import ReceivedEmbeddings

WINDOW_REQUESTS = 16
"""Number of recent requests that show whether the engine loads embeddings; it loads none from the object store."""
MIN_LOADED_SHARE = 0.75
"""Share of them whose embeddings the engine must have loaded; the others were submitted twice."""


class EarlyPrefill:
    """Decides which requests of one engine are prefilled early."""

    def __init__(self) -> None:
        self._loaded: deque[bool] = deque(maxlen=WINDOW_REQUESTS)
        self.num_waiting = 0
        """Requests at vLLM of which some embeddings are not received yet."""

    def is_eligible(self, image_refs: Sequence[ImageReference], encodings: Sequence[Encoding]) -> bool:
        """Whether a request waits for an encoder, its grids are known, and the engine is expected to load all of its
        embeddings. A request whose embeddings are all in shared memory receives them too soon to benefit."""
        return (
            _awaits_encoder(encodings)
            and not any(_is_unavailable(encoding) for encoding in encodings)
            and all(image_ref.grid_thw is not None for image_ref in image_refs)
            and sum(self._loaded) >= MIN_LOADED_SHARE * len(self._loaded)
        )

    def record(self, encodings: Sequence[Encoding], received: ReceivedEmbeddings) -> None:
        """Must be called for every request whose embeddings were received; records whether the engine loads them."""
        if _awaits_encoder(encodings):
            self._loaded.append(received.engine_loads)


def _awaits_encoder(encodings: Sequence[Encoding]) -> bool:
    return not all(isinstance(encoding, SharedEmbedding) for encoding in encodings)


def _is_unavailable(encoding: object) -> bool:
    return isinstance(encoding, SharedEmbedding) and encoding.server == PREFIX_CACHE_ONLY
