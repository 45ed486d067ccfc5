"""Images of earlier turns: they are hashed, and encoded only if a language model asks for them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response

from configs.resolve import PROJECT_ROOT
from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import Accepted, Deferred, ImageJob, NotEncoded, SharedEmbedding
from deployments.common.replica_errors import IdentityGoneError
from deployments.ingress import attempt
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.image_parts import BodyFormat, image_parts
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import EARLIER_IMAGE_COST
from encoder.images.generic_identity import GenericIdentity
from encoder.images.size import read_header
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate
from tests.unit.deployments.ingress.test_embedding_directory import seen
from tests.unit.deployments.samples import IDENTITY, png
from tests.unit.deployments.stand_ins import JSON_HEAD, Accepting, Pieces, StandIns, asked, ingress_of

ANSWER: dict[str, object] = {"role": "assistant", "content": "Done."}
TOKENS = 4
"""Of one picture."""
GENERIC = GenericIdentity("checkpoint", "settings", ((TOKENS,) * 4,) * 4)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "FIRST_RETRY_DELAY_S", 0)


def picture(number: int, **size: int) -> dict[str, object]:
    file = base64.b64encode(png(colour=(number, number // 256, 1), **size)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


def user(*pictures: dict[str, object]) -> dict[str, object]:
    return {"role": "user", "content": [*pictures, {"type": "text", "text": "And now?"}]}


def turn(number: int, **size: int) -> list[dict[str, object]]:
    """All messages of a conversation of `number` turns, each with a picture."""
    earlier = [[user(picture(each, **size)), ANSWER] for each in range(number - 1)]
    return [*itertools.chain(*earlier), user(picture(number - 1, **size))]


def ask(stand_ins: StandIns, *conversations: Sequence[object], **limits: Any) -> list[Response]:
    """The responses of one ingress, which is asked one after the other."""

    async def all_asked() -> list[Response]:
        ingress = ingress_of(stand_ins, **limits)
        responses = []
        for messages in conversations:
            body = json.dumps({"messages": messages}).encode()
            scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}

            async def receive(body: bytes = body) -> dict[str, Any]:
                return {"type": "http.request", "body": body}

            responses.append(await ingress(Request({**scope, "query_string": b"", "headers": []}, receive)))
        return responses

    return asyncio.run(all_asked())


def statuses(stand_ins: StandIns, *conversations: Sequence[object], **limits: Any) -> list[int]:
    return [response.status_code for response in ask(stand_ins, *conversations, **limits)]


def sent(stand_ins: StandIns) -> list[list[type]]:
    """With what each call of a language model came."""
    return [[type(one) for one in given] for given in stand_ins.given]


class Encodes(Accepting):
    def accepted(self) -> Accepted:
        return Accepted()


def test_twenty_turns_of_screenshots_pass_the_shipped_configuration() -> None:
    """Over the bound on images that it sets for one request; each image is encoded once."""
    (application,) = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())["applications"]
    limits = {name: value for name, value in application["args"]["ingress"].items() if name != "auth"}
    assert limits["max_images_per_request"] < 20
    stand_ins = Encodes()
    turns = [turn(number, width=1280, height=800) for number in range(1, 21)]
    assert statuses(stand_ins, *turns, **limits) == [200] * 20
    assert len({job.digest for job in stand_ins.jobs}) == len(stand_ins.jobs) == 20
    assert sent(stand_ins) == [[Deferred] * number + [Pieces] for number in range(20)]
    assert all(job.tokens_before == 0 for job in stand_ins.jobs), "nothing of its request is before it in the queue"


def test_a_prompt_states_what_it_costs_to_leave_the_host_of_its_earlier_images() -> None:
    stand_ins = Encodes()
    assert statuses(stand_ins, turn(1), turn(3)) == [200] * 2
    calls = [Call.from_session_id(label) for label in stand_ins.labels["handle"]]
    assert [call.leaving_cost for call in calls] == [0, EARLIER_IMAGE_COST * 2 * TOKENS]


def test_a_count_costs_the_same_anywhere() -> None:
    """All its images are deferred, new ones too."""
    stand_ins = Encodes()
    assert asked(stand_ins, "POST", "/tokenize", json={"messages": turn(3)}).status_code == 200
    (label,) = stand_ins.labels["handle"]
    assert Call.from_session_id(label).leaving_cost == 0


def test_what_an_engine_asks_for_is_encoded_and_nothing_else() -> None:
    """The image that is being encoded goes on."""
    stand_ins = Encodes(Pieces(NotEncoded((0, 2))), Pieces(NotEncoded((1,))))
    assert statuses(stand_ins, turn(5)) == [200]
    first, second, third = stand_ins.given
    assert sent(stand_ins) == [
        [Deferred] * 4 + [Pieces],
        [Pieces, Deferred, Pieces, Deferred, Pieces],
        [Pieces, Pieces, Pieces, Deferred, Pieces],
    ]
    assert first[4] is second[4] is third[4]
    assert second[0] is third[0]
    keys = [[header.digest for header in headers] for headers in stand_ins.headers]
    assert [job.digest for job in stand_ins.jobs] == [keys[0][number] for number in (4, 0, 2, 1)]
    assert not any(encoding.cancelled for encoding in stand_ins.encodings)


def test_what_was_asked_for_once_is_not_deferred_again() -> None:
    """A language model is lost; the next one gets at once what the first had to ask for."""
    stand_ins = Encodes(Pieces(NotEncoded((0,))), Pieces(RayActorError()))
    assert statuses(stand_ins, turn(3), rate_limit={"visual_tokens_per_minute": 2 * TOKENS}) == [200]
    assert sent(stand_ins) == [[Deferred, Deferred, Pieces], *[[Pieces, Deferred, Pieces]] * 2]


def test_what_was_asked_for_is_charged_once_however_often_the_encoders_change() -> None:
    """A rolling update after an engine had asked for an image: the next attempt deferred and charged it again."""
    updated = dataclasses.replace(IDENTITY, forward="fused")

    class Updated(Encodes):
        def _handle(self, *arguments: Any) -> Pieces:
            if any(isinstance(one, Deferred) for one in arguments[3]):
                self.answers = [Pieces(NotEncoded((0,)))]
            elif len(self.requests) == 1:
                self.answers = [Pieces(IdentityGoneError("none"))]
                self.run(updated)
            return super()._handle(*arguments)

    stand_ins = Updated()
    limits = {"max_visual_tokens_per_request": TOKENS, "max_visual_tokens_in_flight": 2 * TOKENS}
    assert statuses(stand_ins, turn(2), rate_limit={"visual_tokens_per_minute": 2 * TOKENS}, **limits) == [200]
    assert sent(stand_ins) == [[Deferred, Pieces], *[[Pieces, Pieces]] * 2]


def test_an_encoder_that_fails_on_what_was_asked_for_is_tried_again() -> None:
    stand_ins = StandIns(
        Pieces(NotEncoded((0,))), Pieces(NotEncoded((0,))), encodings=[Pieces("new"), Pieces(RayActorError())]
    )
    assert statuses(stand_ins, turn(2)) == [200]
    assert sent(stand_ins) == [[Deferred, Pieces], [Pieces, Pieces], [Pieces, Pieces]]
    assert len(stand_ins.encodings) == 4


class Reads(Accepting):
    """Language models that read each embedding from an encoder's memory."""

    def accepted(self) -> Accepted:
        digests = [header.digest for header in self.headers[-1]]
        read = [not isinstance(one, Deferred) for one in self.given[-1]]
        return Accepted(tuple(seen(key) if known else None for key, known in zip(digests, read, strict=True)))


def test_where_it_was_last_seen_goes_along_until_it_is_not_there() -> None:
    reads = Reads(*(Pieces(JSON_HEAD, b"{}") for _ in range(2)), Pieces(NotEncoded((0,))))
    assert statuses(reads, turn(1), turn(2), turn(2)) == [200] * 3
    assert sent(reads) == [[Pieces], [Deferred, Pieces], [Deferred, SharedEmbedding], [Pieces, SharedEmbedding]]
    known = reads.given[2][0]
    assert isinstance(known, Deferred)
    assert known.location is not None
    assert known.location.digest == reads.jobs[0].digest == reads.jobs[-1].digest
    assert len(reads.jobs) == 3


@pytest.mark.parametrize(("per_minute", "expected"), [(3, [200] * 3), (4, [200] * 4), (2, [200, 200, 429])])
def test_a_quota_counts_what_is_encoded(per_minute: int, expected: list[int]) -> None:
    """A picture a turn; not those before it."""
    turns = [turn(number + 1) for number in range(len(expected))]
    assert statuses(StandIns(), *turns, rate_limit={"visual_tokens_per_minute": per_minute * TOKENS}) == expected


@pytest.mark.parametrize(("most", "status"), [(2, 429), (3, 200)])
def test_what_is_asked_for_counts_for_the_quota(most: int, status: int) -> None:
    stand_ins = StandIns(Pieces(NotEncoded((0, 1))))
    assert statuses(stand_ins, turn(4), rate_limit={"visual_tokens_per_minute": most * TOKENS}) == [status]
    assert len(stand_ins.encodings) == (3 if status == 200 else 1)


def test_more_than_may_be_in_flight_is_refused_once_it_is_asked_for() -> None:
    """However many turns there are: while the engine has them they cost nothing."""
    limits = {"max_visual_tokens_per_request": 2 * TOKENS, "max_visual_tokens_in_flight": 3 * TOKENS}
    stand_ins = StandIns(Pieces(JSON_HEAD, b"{}"), Pieces(NotEncoded((0, 1, 2, 3))))
    first, second = ask(stand_ins, turn(5), turn(5), **limits)
    assert (first.status_code, second.status_code) == (200, 400)
    assert b"20 visual tokens must be encoded, the limit is 12" in second.body
    assert all(encoding.cancelled for encoding in stand_ins.encodings[1:])


def test_a_refusal_names_the_field_of_its_route() -> None:
    """It named `messages` on `/v1/responses`, whose images are in `input`."""
    shown = [{"type": "input_image", "image_url": picture(number)["image_url"]["url"]} for number in range(3)]  # type: ignore[index]
    body = {"input": [user(shown[0]), ANSWER, user(shown[1]), ANSWER, user(shown[2])]}
    limits = {"max_visual_tokens_per_request": 2 * TOKENS, "max_visual_tokens_in_flight": 2 * TOKENS}
    refused = asked(StandIns(Pieces(NotEncoded((0, 1)))), "POST", "/v1/responses", json=body, limits=limits)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "12 visual tokens must be encoded" in refused.json()["error"]["message"]


def counted(stand_ins: StandIns, path: str, **limits: Any) -> int:
    """Status of a request whose tokens are counted: two turns with a picture each."""
    files = [base64.b64encode(png(colour=(number, 0, 1))).decode() for number in range(2)]
    shown: list[dict[str, object]] = (
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}} for file in files]
        if path == "/tokenize"
        else [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": f}} for f in files]
    )
    body = {"messages": [user(shown[0]), ANSWER, user(shown[1])]}
    return asked(stand_ins, "POST", path, json=body, limits=limits).status_code


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_count_of_tokens_encodes_nothing(path: str) -> None:
    """The headers of the images tell their tokens. Nothing is charged, but each image is checked."""
    stand_ins = Encodes()
    assert counted(stand_ins, path, rate_limit={"visual_tokens_per_minute": 1}) == 200
    assert (sent(stand_ins), stand_ins.jobs) == ([[Deferred] * 2], [])
    assert all(header is not None for header in stand_ins.headers[0])
    assert counted(Encodes(), path, max_visual_tokens_per_image=TOKENS - 1) == 400


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_only_an_encoder_with_vllms_processor_can_count_tokens(path: str) -> None:
    stand_ins = Describes()
    assert counted(stand_ins, path) == 200
    assert (sent(stand_ins), len(stand_ins.jobs)) == ([[Pieces] * 2], 2)


@pytest.mark.parametrize(("earlier", "new", "refusal"), [(5, 1, None), (6, 1, "the earlier turns"), (5, 3, "the req")])
def test_earlier_images_are_bounded_apart(earlier: int, new: int, refusal: str | None) -> None:
    limits = IngressConfig(max_images_per_request=2, max_earlier_images_per_request=5)
    said = [user(*(picture(n) for n in range(earlier))), ANSWER, user(*(picture(100 + n) for n in range(new)))]
    body = [json.dumps({"messages": said}).encode()]
    if refusal is None:
        assert len(ChatRequest.parse(body, limits, body_format=BodyFormat.CHAT, salt=None).images) == earlier + new
        return
    with pytest.raises(ApiError, match=f"{refusal}.* images, the limit is"):
        ChatRequest.parse(body, limits, body_format=BodyFormat.CHAT, salt=None)


@pytest.mark.parametrize(
    ("messages", "new"),
    [
        ([user(picture(1))], [True]),
        ([user(picture(1)), user(picture(2))], [True, True]),
        ([user(picture(1)), ANSWER, user(picture(2)), user(picture(3))], [False, True, True]),
        ([user(picture(1)), ANSWER, ANSWER, user()], [False]),
        ([user(picture(1)), ANSWER, {"role": "tool", "content": [picture(2)]}], [False, True]),
        ([user(picture(1)), ANSWER, user(picture(2)), ANSWER], [False, True]),
    ],
)
def test_new_is_what_comes_after_the_last_answer(messages: list[object], new: list[bool]) -> None:
    """The last message of all is no answer yet: the model is to go on with it."""
    assert [part.is_new for part in image_parts({"messages": messages})] == new


def test_new_is_what_comes_after_the_last_item_of_the_model() -> None:
    """In the Responses API, a call of a function is an item without a role."""
    shown = {"type": "input_image", "image_url": "https://example.com/a.png"}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": [dict(shown)]}
    body = {"input": [user(dict(shown)), call, result]}
    assert [part.is_new for part in image_parts(body, BodyFormat.RESPONSES)] == [False, True]


def test_new_is_what_comes_after_the_last_tool_use() -> None:
    """In the Messages API, a tool's result is in a message of the user."""
    shown = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    result: dict[str, object] = {"type": "tool_result", "tool_use_id": "1", "content": [dict(shown)]}
    body = {"messages": [user(dict(shown)), use, user(result)]}
    assert [part.is_new for part in image_parts(body, BodyFormat.MESSAGES)] == [False, True]


def test_an_image_that_is_shown_again_is_new() -> None:
    stand_ins = Encodes()
    assert statuses(stand_ins, [user(picture(1)), ANSWER, user(picture(2)), ANSWER, user(picture(1))]) == [200]
    assert sent(stand_ins) == [[Pieces, Deferred]]


def test_an_image_seen_before_is_only_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def counted(data: bytes, **limits: Any) -> object:
        read.append(data)
        return read_header(data, **limits)

    monkeypatch.setattr("deployments.ingress.image_jobs.read_header", counted)
    stand_ins = Encodes()
    assert statuses(stand_ins, *(turn(number) for number in range(1, 6))) == [200] * 5
    assert len(read) == len(set(read)) == 5
    jobs = [job for encoding in stand_ins.encodings for job in encoding._pieces if isinstance(job, ImageJob)]
    assert {job.num_tokens for job in jobs} == {TOKENS}


class Describes(Encodes):
    """Encoders with vLLM's processor, which alone knows headers, and language models that read from their memory."""

    def __init__(self, *answers: Pieces) -> None:
        super().__init__(*answers)
        self.run(GENERIC)

    def accepted(self) -> Accepted:
        coming = iter(self.jobs[-sum(isinstance(one, Pieces) for one in self.given[-1]) :])
        return Accepted(tuple(described(next(coming)) if isinstance(one, Pieces) else None for one in self.given[-1]))


def described(job: ImageJob) -> SharedEmbedding:
    update = PromptUpdate("replace", (7,), (PromptRun(7, 6, True),))
    return dataclasses.replace(seen(job.digest), header=ItemHeader(job.digest, "image", 6, (update,), (1, 4, 6)))


def test_without_its_header_no_image_is_deferred() -> None:
    """vLLM could not get the request. Where an encoder has described one of an earlier turn, its header goes along."""
    stand_ins = Describes()
    assert statuses(stand_ins, turn(3), turn(4)) == [200] * 2
    assert sent(stand_ins) == [[Pieces] * 3, [Deferred] * 3 + [Pieces]]
    assert stand_ins.headers == [[None] * 3, [None] * 4]
    digests = [job.digest for job in stand_ins.jobs]
    for one in stand_ins.given[1][:3]:
        assert isinstance(one, Deferred)
        assert one.location is not None
        assert one.location.header is not None
        assert one.location.header.digest == one.location.digest
        digests.remove(one.location.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("stand_ins", "expected"), [(Encodes(), [0, TOKENS, 2 * TOKENS]), (Describes(), [2 * TOKENS] * 3)]
)
def test_images_have_one_place_in_the_queue_if_vllm_begins_after_the_last(
    stand_ins: Encodes | Describes, expected: list[int]
) -> None:
    """vLLM begins with the first image where headers are known, and gets the request after the last where not."""
    assert statuses(stand_ins, [user(*map(picture, range(3)))]) == [200]
    assert [job.tokens_before for job in stand_ins.jobs] == expected


@pytest.mark.parametrize(("most", "status"), [(2, 429), (3, 200)])
def test_what_cannot_be_deferred_counts_for_the_quota(most: int, status: int) -> None:
    stand_ins = Describes()
    assert statuses(stand_ins, turn(3), rate_limit={"visual_tokens_per_minute": most * TOKENS}) == [status]
    assert len(stand_ins.jobs) == (3 if status == 200 else 0)


def test_a_described_image_that_is_nowhere_any_more_is_encoded_again() -> None:
    stand_ins = Describes(Pieces(JSON_HEAD, b"{}"), Pieces(NotEncoded((0,))))
    assert statuses(stand_ins, turn(1), turn(2)) == [200] * 2
    assert sent(stand_ins) == [[Pieces], [Deferred, Pieces], [Pieces, Pieces]]
