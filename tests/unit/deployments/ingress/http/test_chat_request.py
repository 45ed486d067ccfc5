"""Fields of a chat: pixel bounds, media, and what is refused."""

from __future__ import annotations

import json

import pytest

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import ItemReference, VideoSampling
from deployments.ingress.http.chat_request import ChatRequest, has_media, pop_pixel_bounds, pop_video_sampling
from deployments.ingress.http.image_parts import BodyFormat, ImagePart
from deployments.ingress.http.request_body import refuse_fields
from encoder.images.size import PixelBounds
from tests.fuzz.bodies import IMAGE, URL


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        (None, None),
        ({}, PixelBounds()),
        ({"min_pixels": 100}, PixelBounds(100, None)),
        ({"max_pixels": 100}, PixelBounds(None, 100)),
        ({"min_pixels": 100, "max_pixels": 100}, PixelBounds(100, 100)),
    ],
)
def test_bounds_are_taken_out_of_the_body(asked: object, bounds: PixelBounds | None) -> None:
    body = {"model": "m", "mm_processor_kwargs": asked}
    assert pop_pixel_bounds(body) == bounds
    assert body == {"model": "m"}
    assert pop_pixel_bounds(body) is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "must be an object"),
        ("min_pixels", "must be an object"),
        ({"size": 1}, "only min_pixels and max_pixels can be chosen by a request"),
        ({"min_pixels": 0}, "min_pixels must be an integer from 1 to 1099511627776, got 0"),
        ({"max_pixels": -5}, "max_pixels must be an integer from 1 to 1099511627776, got -5"),
        ({"max_pixels": True}, "max_pixels must be an integer from 1 to 1099511627776, got True"),
        ({"max_pixels": 1.5}, "max_pixels must be an integer from 1 to 1099511627776, got 1.5"),
        ({"max_pixels": None}, "max_pixels must be an integer from 1 to 1099511627776, got None"),
        ({"min_pixels": 101, "max_pixels": 100}, "min_pixels is 101; it must not be over max_pixels, 100"),
        ({"min_pixels": 10**400}, "min_pixels must be an integer from 1 to 1099511627776, got 1000"),
        ({"max_pixels": 10**400}, "max_pixels must be an integer from 1 to 1099511627776, got 1000"),
    ],
)
def test_bounds_are_checked(asked: object, told: str) -> None:
    """10**400 overflowed a float in the size arithmetic, which was answered with status 500."""
    with pytest.raises(ApiError) as refused:
        pop_pixel_bounds({"mm_processor_kwargs": asked})
    assert (refused.value.status, refused.value.param) == (400, "mm_processor_kwargs")
    assert told in refused.value.message


@pytest.mark.parametrize("name", ["prompt_embeds", "previous_input_messages"])
def test_fields_that_carry_media_are_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        refuse_fields({name: {"image": {}}})
    assert (refused.value.status, refused.value.param) == (400, name)
    refuse_fields({name: None, "model": "m"})


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_fields_of_the_engine_are_refused_in_xargs_too(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        refuse_fields({"vllm_xargs": {name: "remote"}})
    assert (refused.value.status, refused.value.param) == (400, f"vllm_xargs.{name}")
    refuse_fields({"vllm_xargs": {"custom": "value"}})
    refuse_fields({"vllm_xargs": None})


@pytest.mark.parametrize(
    ("kwargs", "sampling"),
    [
        (None, VideoSampling()),
        ({}, VideoSampling()),
        ({"video": {"fps": None}}, VideoSampling()),
        ({"video": {"fps": 2}}, VideoSampling(2.0, None)),
        ({"video": {"num_frames": 8, "fps": 0.5}}, VideoSampling(0.5, 8)),
    ],
)
def test_sampling_of_videos_is_taken_out_of_the_body(kwargs: object, sampling: VideoSampling) -> None:
    body = {"model": "m", "media_io_kwargs": kwargs}
    assert pop_video_sampling(body, 8) == sampling
    assert body == {"model": "m"}


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ([], "only video.fps and video.num_frames"),
        ({"image": {"image_mode": None}}, "only video.fps and video.num_frames"),
        ({"video": {"backend": "pynvvideocodec"}}, "only video.fps and video.num_frames"),
        ({"video": [1]}, "only video.fps and video.num_frames"),
        ({"video": {"num_frames": 9}}, "video.num_frames must be an integer from 1 to the limit, 8, got 9"),
        ({"video": {"num_frames": -1}}, "video.num_frames must be"),
        ({"video": {"num_frames": True}}, "video.num_frames must be"),
        ({"video": {"fps": 0}}, "video.fps must be a number over 0 and up to 240, got 0"),
        ({"video": {"fps": "2"}}, "video.fps must be"),
        ({"video": {"fps": float("nan")}}, "video.fps must be"),
        ({"video": {"fps": float("inf")}}, "video.fps must be"),
    ],
)
def test_other_sampling_is_refused(kwargs: object, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        pop_video_sampling({"media_io_kwargs": kwargs}, 8)
    assert (refused.value.status, refused.value.param) == (400, "media_io_kwargs")
    assert told in refused.value.message


@pytest.mark.parametrize(
    ("key", "place"),
    [("use_audio_in_video", ""), ("fps", "; it belongs in media_io_kwargs.video"), ("size", "")],
)
def test_other_settings_of_processors_are_refused_by_name_with_the_place_of_ours(key: str, place: str) -> None:
    with pytest.raises(ApiError) as refused:
        pop_pixel_bounds({"mm_processor_kwargs": {"min_pixels": 3, key: True}})
    allowed = "only min_pixels and max_pixels can be chosen by a request"
    assert refused.value.message == f"mm_processor_kwargs.{key}: {allowed}{place}"


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"previous_response_id": "resp_1"}, "responses are not stored"), ({"background": True}, "ends with its request")],
)
def test_what_vllm_would_store_itself_is_refused_with_the_reason(fields: dict[str, object], told: str) -> None:
    """vLLM keeps it in one replica's memory, with references to images that end with their request."""
    with pytest.raises(ApiError, match=told) as refused:
        refuse_fields(fields)
    assert (refused.value.status, refused.value.param) == (400, *fields)
    refuse_fields({"previous_response_id": None, "background": False, "store": True})


@pytest.mark.parametrize(
    "value",
    [
        IMAGE,
        [{"content": [IMAGE]}],
        {"a": {"b": [[{"type": "input_image"}]]}},
        {"type": "input_file", "file_url": "https://example.com"},
        {"type": "message", "content": [{"type": "text", "image_embeds": "vitray:AAAA"}]},
        {"video_url": None},
    ],
)
def test_media_are_found_anywhere(value: object) -> None:
    assert has_media(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "image_url",
        1,
        [],
        {},
        {"type": "text", "text": "image_url"},
        [[["input_image"]]],
        {"type": [1]},
        {"type": {}},
    ],
)
def test_text_holds_no_media(value: object) -> None:
    """A type that is no string was looked up in a set, where a list is a TypeError: status 500."""
    assert not has_media(value)


def test_media_are_found_however_deep() -> None:
    """A recursive walk gave up at a depth that the JSON parser still reads, which was answered with status 500."""
    deep: object = IMAGE
    for _ in range(100_000):
        deep = [deep]
    assert has_media(deep)


def test_only_images_of_the_own_items_are_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all turns were encoded to base64 again at each turn, and thrown away."""
    restored: list[str] = []
    restore = ImagePart.restore

    def noted(image: ImagePart) -> None:
        restored.append(image.label)
        restore(image)

    monkeypatch.setattr(ImagePart, "restore", noted)
    part = {"type": "input_image", "image_url": URL}
    earlier, output, own = (
        {"type": "message", "role": "user", "content": [part]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}, part]},
    )
    chunks = [json.dumps({"model": "m", "input": [earlier, output, own]}).encode()]
    chat = ChatRequest.parse(chunks, IngressConfig(), body_format=BodyFormat.RESPONSES, salt=None)
    chat.to_json([ItemReference("a", 0, "image 1"), ItemReference("b", 1, "image 2")], ["0" * 64, "1" * 64])
    (item,) = chat.own_items(2)
    assert restored == [chat.images[1].label]
    kept = json.loads(item)["content"][1]["image_url"]
    assert kept.split(",")[1] == URL.split(",")[1]
