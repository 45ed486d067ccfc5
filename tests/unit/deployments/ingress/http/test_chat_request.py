"""Fields of a chat: pixel bounds, and what is refused."""

from __future__ import annotations

import pytest

from deployments.common.api_error import ApiError
from deployments.ingress.http.chat_request import pop_pixel_bounds, refuse_fields
from encoder.images.size import PixelBounds


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
        ({"size": 1}, "only min_pixels and max_pixels are supported, got 'size'"),
        ({"min_pixels": 0}, "min_pixels must be a positive integer, got 0"),
        ({"max_pixels": -5}, "max_pixels must be a positive integer, got -5"),
        ({"max_pixels": True}, "max_pixels must be a positive integer, got True"),
        ({"max_pixels": 1.5}, "max_pixels must be a positive integer, got 1.5"),
        ({"max_pixels": None}, "max_pixels must be a positive integer, got None"),
        ({"min_pixels": 101, "max_pixels": 100}, "min_pixels is 101; it must not be over max_pixels, 100"),
        ({"min_pixels": 10**400}, "min_pixels is over the limit of"),
        ({"max_pixels": 10**400}, "max_pixels is over the limit of"),
    ],
)
def test_bounds_are_checked(asked: object, told: str) -> None:
    """10**400 overflowed a float in the size arithmetic, which was answered with status 500."""
    with pytest.raises(ApiError) as refused:
        pop_pixel_bounds({"mm_processor_kwargs": asked})
    assert (refused.value.status, refused.value.param) == (400, "mm_processor_kwargs")
    assert told in refused.value.message


@pytest.mark.parametrize("name", ["prompt_embeds", "media_io_kwargs", "previous_input_messages"])
def test_fields_that_carry_media_are_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        refuse_fields({name: {"image": {}}})
    assert (refused.value.status, refused.value.param) == (400, name)
    refuse_fields({name: None, "model": "m"})


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_stored_responses_are_refused_with_the_reason(fields: dict[str, object]) -> None:
    """vLLM keeps them in one replica's memory, with references to images that end with their request."""
    with pytest.raises(ApiError, match="responses are not stored: one replica") as refused:
        refuse_fields(fields)
    assert (refused.value.status, refused.value.param) == (400, *fields)
    refuse_fields({"previous_response_id": None, "background": False, "store": True})
