"""Requests that vLLM is given while their embeddings are on their way: its front reads them, and its engine the prompt
as far as embeddings are there (`deployments/ec_scheduler.py`).

What comes otherwise than expected is no harm: vLLM gives the request up before its first token, and is given it again
with what came. It must not know how vLLM answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from deployments.arrived import Arrived
from deployments.incoming import Encoding, Incoming
from deployments.metrics import Count, Counts
from deployments.pieces import Begun
from deployments.vllm_answers import Arrival, VllmAnswers
from deployments.wire import NOWHERE, HttpRequest, ImageJob, ImagePlace, ResponseHead, SharedEmbedding

Answer = Begun[ResponseHead | bytes]


class Early:
    """Of one engine."""

    def __init__(self, incoming: Incoming, answers: VllmAnswers, counts: Counts) -> None:
        self._incoming = incoming
        self._answers = answers
        self._counts = counts
        self.num_begun = 0
        """Requests that vLLM has while something of theirs has not come."""

    def suits(self, places: Sequence[ImagePlace], encodings: Sequence[Encoding | ImageJob]) -> bool:
        """Whether some of a request's embeddings have to be waited for, all are to come to where the engine can load
        them from, and it is known what they are going to be. What lies in shared memory already is there too soon."""
        return (
            not all(isinstance(one, SharedEmbedding) for one in encodings)
            and not any(isinstance(one, ImageJob) or _nowhere(one) for one in encodings)
            and all(place.grid_thw is not None for place in places)
        )

    def begin(
        self, request: HttpRequest, places: Sequence[ImagePlace], embeddings: Arrived, arrival: Arrival
    ) -> Answer:
        """Gives it to vLLM. Let `arrived` follow."""
        self._counts.add(Count.PROMPTS_BEGUN)
        answer: AsyncGenerator[ResponseHead | bytes, None]
        answer = self._answers.answer(request, places, embeddings, arrival, expected=True)
        return Begun(answer)

    async def arrived(
        self, begun: Answer, places: Sequence[ImagePlace], encodings: Sequence[Encoding], embeddings: Arrived
    ) -> Answer | None:
        """Waits until all have come. None where vLLM has to be given the request again, which it has given up by then.

        Raises what `Incoming.arrive` does, and TransferFailedError for what lies in an embedding's place.
        """
        self.num_begun += 1
        try:
            await self._incoming.arrive(encodings, embeddings, one_by_one=True)
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


def _nowhere(encoding: object) -> bool:
    return isinstance(encoding, SharedEmbedding) and encoding.lender == NOWHERE
