"""An image is encoded once, and the Server-Timing header tells where the time of a request went."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deployments.telemetry.metrics import Counter
from tests.serve import pictures
from tests.serve.application import ServedApplication
from tests.serve.asking import Json, ask, post, settled, streaming
from tests.serve.comparison import difference
from tests.serve.conversations import SEVERAL_BLOCKS, Body, about, chat, image, text, user
from tests.waiting import until

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
VLLM_CACHES_TOKENS = 2048
"""Of the embeddings that vLLM keeps: as many as it computes at once."""
STAGES = ("fetch", "preprocess", "admission", "queue", "encode", "transfer", "first-token")


def timing(response: httpx.Response) -> dict[str, str]:
    """The entries of Server-Timing by name."""
    assert response.status_code == 200, response.text
    entries = [entry.strip().partition(";") for entry in response.headers["server-timing"].split(",")]
    return {name: rest for name, _, rest in entries}


def ask_timed(base_url: str, body: Body) -> tuple[Json, str]:
    """The answer, and how many of its images came from the cache: "1/2"."""
    response = post(base_url, CHAT, body)
    return response.json(), timing(response)["cache"].removeprefix('desc="').removesuffix('"')


def test_the_second_time_an_image_comes_from_the_cache(base_url: str) -> None:
    body = about(pictures.url(400, 97, 61))
    first, cached_first = ask_timed(base_url, body)
    second, cached_second = ask_timed(base_url, body)
    assert (cached_first, cached_second) == ("0/1", "1/1")
    difference(second, first, tolerance=1e-3)


def test_the_engine_loads_embeddings_by_itself(base_url: str) -> None:
    """Told to, or found out; once the ingress has heard from the language model where it is. That its answers are those
    of vLLM alone is what test_parity.py compares."""
    ask(base_url, about(pictures.url(410)))
    body = chat(user(image(pictures.url(411)), image(pictures.url(412)), text("Compare.")))
    assert timing(post(base_url, CHAT, body))["path"] == 'desc="engine_loads"'


def test_vllm_has_a_request_while_its_images_are_encoded(application: ServedApplication, qwen3: str) -> None:
    """Once the engine has loaded what came before. The answers are those of vLLM alone: test_parity.py again."""
    before = settled(lambda: application.exported("qwen3", "LLM", Counter.EARLY_PREFILLS))
    for number in range(8):
        ask(qwen3, chat(user(*(image(pictures.url(380 + 2 * number + n, 90, 90)) for n in range(2)), text("Compare."))))
    until(lambda: application.exported("qwen3", "LLM", Counter.EARLY_PREFILLS) >= before + 4)


def test_the_engine_does_not_load_what_its_prefix_cache_has(application: ServedApplication, qwen3: str) -> None:
    """Of a request with the same beginning and a new picture at its end it loads the new one alone; after another
    beginning, both. Before it come so many others that vLLM's cache of embeddings, which does not look at the prompt,
    has nothing left of the first."""

    def loaded() -> float:
        return application.exported("qwen3", "LLM", Counter.EMBEDDINGS_LOADED)

    def about_two(number: int, opening: str) -> Body:
        return chat(
            {"role": "system", "content": opening},
            user(image(first), text(SEVERAL_BLOCKS), image(pictures.url(420 + number, 90, 70))),
        )

    first = pictures.url(420, 200, 150)
    ask(qwen3, about(first))
    ask(qwen3, about(first, "Where is it?"))  # the encoder lends it from now on
    ask(qwen3, about_two(1, "Be brief."))
    others = [chat(user(*(image(pictures.url(430 + 8 * n + k, 448, 448)) for k in range(8)))) for n in range(2)]
    assert sum(ask(qwen3, body)["usage"]["prompt_tokens"] for body in others) > VLLM_CACHES_TOKENS + 2 * 100
    before = settled(loaded)
    again = post(qwen3, CHAT, about_two(2, "Be brief."))
    assert timing(again)["path"] == 'desc="engine_loads"', "it was lent both"
    until(lambda: loaded() == before + 1)
    ask(qwen3, about_two(3, "Take your time."))
    until(lambda: loaded() == before + 3)


def test_images_without_room_in_shared_memory_mix_with_others(application: ServedApplication) -> None:
    """Such an embedding is read by TCP, and the engine loads it like the others of the request."""
    qwen25 = application.base_url("qwen25")
    small, large = image(pictures.url(413)), image(pictures.url(414, 896, 896))
    ask(qwen25, chat(user(image(pictures.url(415)), text("What is it?"))))
    first = post(qwen25, CHAT, chat(user(small, text("What is it?"))))
    assert timing(first)["path"] == 'desc="engine_loads"'
    both = chat(user(small, large, text("Compare.")))
    answer = ask(qwen25, both)
    alone = post(qwen25, CHAT, chat(user(large, text("What is it?"))))
    assert timing(alone)["path"] == 'desc="tcp"'
    difference(ask(qwen25, both), answer, tolerance=1e-3)


def test_answers_stay_right_while_clients_leave(qwen3: str) -> None:
    """Embeddings lie in memory that is used again as soon as nobody reads it. Of many requests at once some are given
    up at any stage; what the others are told is what they are told again when nothing else is going on."""
    bodies = [
        chat(user(*(image(pictures.url(500 + 3 * n + k, 70 + n, 90)) for k in range(1 + n % 3)), text("What is it?")))
        for n in range(18)
    ]

    def asked(number: int) -> Json | None:
        patience = httpx.Timeout(600.0, read=0.02 * (1 + number) if number % 3 == 0 else 600.0)
        try:
            response = httpx.post(qwen3 + CHAT, json=bodies[number], timeout=patience)
        except httpx.TimeoutException:
            return None
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(asked, range(len(bodies))))
    assert sum(answer is not None for answer in answers) >= 12
    for answer, body in zip(answers, bodies, strict=True):
        if answer is not None:
            difference(answer, ask(qwen3, body), tolerance=1e-3)


def test_each_distinct_image_counts_once(base_url: str) -> None:
    known, fresh = image(pictures.url(401)), image(pictures.url(402))
    ask(base_url, chat(user(known, text("What is it?"))))
    _, cached = ask_timed(base_url, chat(user(known, fresh, known, fresh, text("Compare."))))
    assert cached == "1/2"


@pytest.mark.parametrize(("seed", "bounds"), [(403, {"max_pixels": 64 * 64}), (404, {"min_pixels": 200 * 200})])
def test_other_bounds_make_another_embedding(base_url: str, seed: int, bounds: Body) -> None:
    url = pictures.url(seed, 130, 120)
    plain, _ = ask_timed(base_url, about(url))
    bounded, cached = ask_timed(base_url, about(url, mm_processor_kwargs=bounds))
    assert cached == "0/1"
    assert bounded["usage"]["prompt_tokens"] != plain["usage"]["prompt_tokens"]


def test_one_flipped_bit_is_another_image(base_url: str) -> None:
    file = bytearray(pictures.encoded(pictures.picture(405, 64, 64), "BMP"))
    ask(base_url, about(pictures.data_url(bytes(file), "BMP")))
    file[-1] ^= 1
    _, cached = ask_timed(base_url, about(pictures.data_url(bytes(file), "BMP")))
    assert cached == "0/1"


def test_an_image_asked_for_by_many_at_once(base_url: str) -> None:
    body = about(pictures.url(406, 300, 200))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(base_url, body), range(8)))
    for answer in answers[1:]:
        difference(answer, answers[0], tolerance=1e-3)
    assert ask_timed(base_url, body)[1] == "1/1"


def test_every_stage_is_timed(base_url: str) -> None:
    stages = timing(post(base_url, CHAT, about(pictures.url(407, 200, 150))))
    assert set(stages) == {*STAGES, "cache", "path", "image-1"}
    durations = {name: float(re.fullmatch(r"dur=(\d+\.\d+)", stages[name])[1]) for name in STAGES}  # type: ignore[index]
    for name in ("preprocess", "encode", "first-token"):
        assert durations[name] > 0, name


def test_a_streamed_answer_is_timed_before_it_ends(qwen3: str) -> None:
    with streaming(qwen3, about(pictures.url(408))) as response:
        assert {*STAGES, "cache", "path", "image-1"} == set(timing(response))


def test_text_has_no_stages_of_images(qwen3: str) -> None:
    assert set(timing(post(qwen3, CHAT, chat({"role": "user", "content": "Hello!"})))) == {"first-token"}
