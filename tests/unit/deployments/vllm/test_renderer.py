"""What vLLM's renderer meets in place of media: the connector, the stand-ins, the cache, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.parse import MultiModalDataParser

from deployments.vllm.headers import cache_item
from deployments.vllm.references import FetchRefusedError, References, UnknownReferenceError
from deployments.vllm.renderer import (
    AudioStandIn,
    HeaderCache,
    ImageStandIn,
    ReferenceConnector,
    VideoStandIn,
    install_references,
    make_connector,
    mm_uuids,
)
from tests.unit.deployments.vllm.test_references import header

MEDIA = ("image", "video", "audio")
DIGEST = header().digest


@pytest.fixture
def references() -> References:
    return References()


@pytest.fixture
def connector(references: References) -> ReferenceConnector:
    connector = make_connector(references)(media_io_kwargs={}, allowed_local_media_path="/")
    assert isinstance(connector, ReferenceConnector)
    return connector


@pytest.mark.parametrize("modality", MEDIA)
def test_a_key_gives_a_stand_in(references: References, connector: ReferenceConnector, modality: str) -> None:
    key = references.add(header(modality=modality))
    fetched = getattr(connector, f"fetch_{modality}")(**{f"{modality}_url": key}, request_id="0")
    awaited = asyncio.run(getattr(connector, f"fetch_{modality}_async")(key, video_processor=None))
    assert fetched.digest == awaited.digest == DIGEST


def test_audio_in_a_part_of_its_own_gives_a_stand_in(references: References, connector: ReferenceConnector) -> None:
    """vLLM makes a data URL of an `input_audio` part."""
    key = references.add(header(modality="audio"))
    assert connector.fetch_audio(f"data:audio/wav;base64,{key}").digest == DIGEST


@pytest.mark.parametrize("modality", MEDIA)
@pytest.mark.parametrize(
    "url",
    [
        "",
        "vitray:guess",
        "http://127.0.0.1/a.png",
        "file:///etc/passwd",
        "data:image/png;base64,iVBORw0KGgo=",
        "data:audio/wav;base64,vitray:guess",
        DIGEST,
    ],
)
def test_nothing_else_is_fetched(
    references: References, connector: ReferenceConnector, modality: str, url: str
) -> None:
    references.add(header(modality=modality))
    with pytest.raises(UnknownReferenceError):
        getattr(connector, f"fetch_{modality}")(url)
    with pytest.raises(UnknownReferenceError):
        asyncio.run(getattr(connector, f"fetch_{modality}_async")(url))


@pytest.mark.parametrize(("stated", "asked"), list(itertools.permutations(MEDIA, 2)))
def test_a_key_is_for_its_own_kind_of_media(
    references: References, connector: ReferenceConnector, stated: str, asked: str
) -> None:
    key = references.add(header(modality=stated))
    with pytest.raises(UnknownReferenceError, match=f"of modality '{stated}' as '{asked}'"):
        getattr(connector, f"fetch_{asked}")(key)


def test_a_unified_modality_is_fetched_as_an_image_or_a_video(
    references: References, connector: ReferenceConnector
) -> None:
    key = references.add(header(modality="vision_chunk"))
    assert connector.fetch_image(key).digest == connector.fetch_video(key).digest == DIGEST


def test_every_other_method_of_vllms_connector_is_refused(connector: ReferenceConnector) -> None:
    """Embeddings, bare URLs, and what a later vLLM adds: an AttributeError would be a 500."""
    theirs = {name for name, _ in inspect.getmembers(MediaConnector, inspect.isfunction) if not name.startswith("_")}
    refused = theirs - set(dir(connector))
    assert {"load_from_url", "load_from_url_async", "fetch_image_embedding"} <= refused
    for name in (*refused, "_fetch_as_a_later_vllm"):
        method = getattr(connector, name)  # which vLLM may look up without calling it
        with pytest.raises(FetchRefusedError):
            asyncio.run(method("x")) if name.endswith("_async") else method("x")
    assert copy.deepcopy(copy.copy(make_connector({})()))._images == {}, "Python looks for methods of its own"


def test_vllms_parser_takes_stand_ins() -> None:
    """Without touching them: nothing is resampled or converted."""
    stand_ins = {"image": [ImageStandIn("a"), ImageStandIn("b")], "video": [VideoStandIn.of("c")]}
    data: dict[str, Any] = {**stand_ins, "audio": [AudioStandIn.of("d")]}
    for parser in (MultiModalDataParser(video_needs_metadata=True, target_sr=16_000), MultiModalDataParser()):
        items = parser.parse_mm_data(data)
        assert items.get_all_counts() == {"image": 2, "video": 1, "audio": 1}
    assert mm_uuids(data, items, {}, "request") == {"image": ["a", "b"], "video": ["c"], "audio": ["d"]}


def test_identifiers_are_the_digests_whatever_the_client_names() -> None:
    """vLLM takes the image out of its wrapper for "vision_chunk"; Kimi K2.5's requests were refused."""
    chunk = {"type": "image", "image": ImageStandIn("b").media, "uuid": "x"}
    data = {"image": ImageStandIn("a"), "vision_chunk": [chunk]}
    assert mm_uuids(data, None, {"image": ["mine"]}, "request") == {"image": ["a"], "vision_chunk": ["b"]}


@pytest.mark.parametrize(
    "item",
    [
        None,
        "text",
        Image.new("RGB", (1, 1)),
        np.zeros((1, 1, 3)),
        {"image_embeds": np.zeros(3)},
        {"image": Image.new("RGB", (1, 1))},
        (np.zeros(1), 16_000),
    ],
)
def test_only_stand_ins_get_identifiers(item: object) -> None:
    """A `null` part with the client's own identifier would else be looked up under it, by any tenant."""
    for items in (item, [ImageStandIn("a"), item]):
        with pytest.raises(FetchRefusedError):
            mm_uuids({"image": items}, None, {"image": [None, "theirs"]}, "request")


def test_the_cache_has_the_items_of_requests_in_flight(references: References) -> None:
    cache = HeaderCache(references)
    key = references.add(header())
    assert cache.is_cached([DIGEST, DIGEST]) == [True, True]
    item, (update,) = cache.get_and_update_item(None, DIGEST)
    expected, (expected_update,) = cache_item(header())
    assert (item, update.content.full) == (expected, expected_update.content.full)
    cache.touch_sender_cache_item(DIGEST)
    cache.clear_cache()
    assert cache.is_cached_item(DIGEST), "vLLM clears its caches whenever an operator asks"
    assert cache.make_stats(delta=True).total == 0
    references.release([key])
    with pytest.raises(UnknownReferenceError):
        cache.is_cached_item(DIGEST)
    with pytest.raises(UnknownReferenceError):
        cache.get_and_update_item(None, DIGEST)


def test_a_processed_stand_in_is_refused(references: References) -> None:
    references.add(header())
    with pytest.raises(FetchRefusedError):
        HeaderCache(references).get_and_update_item(cache_item(header()), DIGEST)


def processor() -> SimpleNamespace:
    return SimpleNamespace(cache=None, _apply_hf_processor=lambda inputs, timing: inputs)


def renderer() -> SimpleNamespace:
    """As vLLM 0.32 has it."""
    caches = {"_mm_processor_cache": None, "_mm_processor_only_cache": None}
    return SimpleNamespace(mm_processor=processor(), **caches, _process_mm_uuids=lambda *_: {})


def test_both_caches_are_replaced(references: References) -> None:
    """`/tokenize` uses a cache of its own; without one the HF processor would process the stand-in."""
    theirs = renderer()
    install_references(theirs, references)
    assert isinstance(theirs._mm_processor_cache, HeaderCache)
    assert theirs._mm_processor_only_cache is theirs._mm_processor_cache
    assert theirs._process_mm_uuids is mm_uuids
    with pytest.raises(FetchRefusedError):
        theirs.mm_processor._apply_hf_processor(None, None)


@pytest.mark.parametrize("readonly", [None, processor()])
def test_both_processors_of_an_older_vllm_get_the_cache(
    references: References, readonly: SimpleNamespace | None
) -> None:
    """Before 0.32 the processors own the caches; the second processor exists only with a cache."""
    readonly = copy.copy(readonly)
    theirs = SimpleNamespace(mm_processor=processor(), _readonly_mm_processor=readonly, _process_mm_uuids=lambda *_: {})
    install_references(theirs, references)
    for each in filter(None, [theirs.mm_processor, readonly]):
        assert isinstance(each.cache, HeaderCache)
        with pytest.raises(FetchRefusedError):
            each._apply_hf_processor(None, None)


@pytest.mark.parametrize("name", ["_mm_processor_cache", "_process_mm_uuids"])
def test_a_vllm_without_what_is_replaced_is_an_error(references: References, name: str) -> None:
    theirs = renderer()
    delattr(theirs, name)
    with pytest.raises(AttributeError, match=f"has no {name}"):
        install_references(theirs, references)


def test_an_engine_with_its_own_tower_gets_images_by_key_and_nothing_else() -> None:
    image = Image.new("RGB", (3, 2))
    connector = make_connector({"vitray:key": (DIGEST, image)})()
    fetched = connector.fetch_image("vitray:key", image_emb=None)
    assert fetched.media is asyncio.run(connector.fetch_image_async("vitray:key")).media is image
    assert mm_uuids({"image": [fetched]}) == {"image": [DIGEST]}
    for url in ("vitray:guess", DIGEST, "http://127.0.0.1/a.png"):
        with pytest.raises(UnknownReferenceError):
            connector.fetch_image(url)
    for modality in ("video", "audio"):
        with pytest.raises(FetchRefusedError):
            asyncio.run(getattr(connector, f"fetch_{modality}_async")("vitray:key"))


def test_an_engine_with_its_own_tower_is_sent_every_item() -> None:
    """After a count of its tokens, a request with the image failed with a 500: the engine was sent only its hash."""
    renderer = SimpleNamespace(
        mm_processor=object(), _mm_processor_cache="sender", _mm_processor_only_cache="whole", _process_mm_uuids=None
    )
    before = vars(renderer).copy()
    install_references(renderer, {})
    assert vars(renderer) == before | {"_process_mm_uuids": mm_uuids, "_mm_processor_cache": "whole"}
    processors = [SimpleNamespace(cache="sender"), SimpleNamespace(cache="whole")]
    older = SimpleNamespace(mm_processor=processors[0], _readonly_mm_processor=processors[1], _process_mm_uuids=None)
    install_references(older, {})
    assert processors[0].cache == "whole"
