"""Requests that vLLM is given while their embeddings are on their way: its front reads them, and its engine the prompt
as far as embeddings are there (`deployments/ec_scheduler.py`).

What comes otherwise than expected is no harm: vLLM gives the request up before its first token, and is given it again
with what came. It must not know how vLLM answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from deployments.arrived import Arrived
from deployments.incoming import Encoding, Incoming
from deployments.metrics import Count, Counts
from deployments.pieces import Started
from deployments.vllm_answers import Arrival, VllmAnswers
from deployments.wire import NOWHERE, HttpRequest, ImageJob, ImagePlace, ResponseHead, SharedEmbedding

Answer = Started[ResponseHead | bytes]

REMEMBERED = 16
"""Requests by which it is known whether the engine loads what comes: not where encoders are on other hosts."""
LEAST_LOADED = 0.75
"""Of them, for the next one to be begun early: the others were given to vLLM twice."""


class Early:
    """Of one engine."""

    def __init__(self, incoming: Incoming, answers: VllmAnswers, counts: Counts) -> None:
        self._incoming = incoming
        self._answers = answers
        self._counts = counts
        self._loaded: deque[bool] = deque(maxlen=REMEMBERED)
        self.num_begun = 0
        """Requests that vLLM has while something of theirs has not come."""

    def suits(self, places: Sequence[ImagePlace], encodings: Sequence[Encoding | ImageJob]) -> bool:
        """Whether some of a request's embeddings have to be waited for, all are to come to where the engine can load
        them from, as lately, and it is known what they are going to be. What lies in shared memory already is there too
        soon."""
        return (
            _awaits(encodings)
            and not any(isinstance(one, ImageJob) or _nowhere(one) for one in encodings)
            and all(place.grid_thw is not None for place in places)
            and sum(self._loaded) >= LEAST_LOADED * len(self._loaded)
        )

    def came(self, encodings: Sequence[Encoding | ImageJob], embeddings: Arrived) -> None:
        """To be told of every request whose embeddings have come."""
        if _awaits(encodings):
            self._loaded.append(embeddings.engine_loads)

    def begin(
        self, request: HttpRequest, places: Sequence[ImagePlace], embeddings: Arrived, arrival: Arrival
    ) -> Answer:
        """Gives it to vLLM. Let `arrived` follow."""
        self._counts.add(Count.PROMPTS_BEGUN)
        return Started(self._answers.answer(request, places, embeddings, arrival, expected=True))

    async def arrived(
        self, begun: Answer, places: Sequence[ImagePlace], encodings: Sequence[Encoding], embeddings: Arrived
    ) -> Answer | None:
        """Waits until all have come. None where vLLM has to be given the request again, which it has given up by then.

        Raises what `Incoming.arrive` does, and TransferFailedError for what lies in an embedding's place.
        """
        self.num_begun += 1
        try:
            await self._incoming.arrive(encodings, embeddings, one_by_one=True)
            self.came(encodings, embeddings)
            why_not = self._answers.why_not_as_expected(places, embeddings)
        except BaseException:
            await begun.give_up()
            raise
        finally:
            self.num_begun -= 1
        if why_not is None:
            return begun
        self._counts.add(Count.PROMPTS_BEGUN_IN_VAIN, reason=why_not)
        await begun.give_up()
        return None


def _awaits(encodings: Sequence[Encoding | ImageJob]) -> bool:
    return not all(isinstance(one, SharedEmbedding | ImageJob) for one in encodings)


def _nowhere(encoding: object) -> bool:
    return isinstance(encoding, SharedEmbedding) and encoding.lender == NOWHERE
