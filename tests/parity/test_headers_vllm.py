"""Headers and prompts by reference against vLLM's own processor and renderer, without an engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen3_5Config
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.processing import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers import ChatParams, renderer_from_config
from vllm.transformers_utils.processor import get_video_processor_cls_name

from configs.resolve import PROJECT_ROOT
from deployments.vllm.headers import cache_item, declared_fields, header_of
from deployments.vllm.references import FetchRefusedError, References, UnknownReferenceError
from deployments.vllm.renderer import install_references, make_connector
from encoder.checkpoint.video_rules import VideoRules
from encoder.checkpoint.vision_config import VisionConfig, image_token_id
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageRules, image_grid
from encoder.item_header import CHUNKS, ItemHeader
from encoder.video.bounds import VideoBounds
from encoder.video.header import read_header
from encoder.video.plan import VideoPlan
from tests.video_files import Clip, frame_list

SCENES = PROJECT_ROOT / "models" / "scenes-8m"
SIZES = [
    (1, 1), (1, 3), (3, 1), (14, 14), (28, 28), (29, 27), (31, 97), (56, 56), (64, 64), (100, 100), (255, 257),
    (256, 256), (300, 200), (333, 77), (77, 333), (320, 320), (500, 20), (20, 500), (640, 480), (641, 479), (719, 721),
    (1000, 700), (1280, 800), (800, 1280), (1500, 37), (37, 1500), (1999, 10), (10, 1999), (1025, 1023), (1600, 1200),
]  # fmt: skip


def identity_of(path: Path) -> EncoderIdentity:
    vision, rules = VisionConfig.from_checkpoint(path), ImageRules.from_checkpoint(path)
    return EncoderIdentity("0" * 64, vision, "float32", rules, image_token_id=image_token_id(path))


def picture(width: int, height: int, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def prepared(processor: Any, image: Image.Image, digest: str) -> ItemHeader:
    """The header of an image that vLLM's processor prepares alone."""
    items = processor.info.parse_mm_data({"image": [image]})
    result = processor._apply_hf_processor(ProcessorInputs([], items), TimingContext(enabled=False))
    found = result if hasattr(result, "kwargs") else result[1]  # before vLLM 0.32
    item, updates = found.kwargs["image"][0], found.prompt_updates["image"][0]
    declared, tokenizer = declared_fields(processor, item, "image"), processor.info.get_tokenizer()
    return header_of(digest, "image", item, updates, declared, tokenizer)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def checkpoint(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """All that a processor reads. Qwen3.5 has Qwen3-VL's processor and a language model of its own."""
    if request.param in checkpoints:
        return checkpoints[request.param]
    folder: Path = tmp_path_factory.mktemp("checkpoint") / request.param
    shutil.copytree(checkpoints["qwen3_vl"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokens = {
        key: value for key, value in json.loads((folder / "config.json").read_text()).items() if "token_id" in key
    }
    config = Qwen3_5Config(**tokens, architectures=["Qwen3_5ForConditionalGeneration"])
    config.save_pretrained(folder)
    return folder


def test_headers_equal_those_of_vllms_processor(checkpoint: Path) -> None:
    """The ingress computes a header from the size that a file states; vLLM's processor needs the pixels."""
    identity = identity_of(checkpoint)
    model_config = EngineArgs(model=str(checkpoint), dtype="float32").create_model_config()
    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    for size in SIZES:
        expected = prepared(processor, picture(*size), "ab" * 32)
        assert identity.header("ab" * 32, image_grid(*size, identity.rules)) == expected, size


VIDEOS: list[tuple[bytes, dict[str, Any]]] = [
    (Clip(30).encode(), {}),
    (Clip(30).encode(), {"fps": 5.0}),
    (Clip(61, Fraction(30), 160, 96).encode(), {"num_frames": 9}),
    (Clip(7, Fraction(2), container="webm").encode(), {}),
    (Clip(40, Fraction(12), container="gif", width=70, height=130).encode(), {"fps": 1.0}),
    (frame_list(Clip(5).pictures()), {}),
    (frame_list(Clip(6).pictures()), {"num_frames": 4, "fps": 2.0}),
]


def test_videos_have_the_fields_and_the_prompt_of_vllms_processor(checkpoint: Path) -> None:
    """The header comes from the container and the request's sampling; vLLM's processor needs the frames."""
    identity = identity_of(checkpoint)
    rules = VideoRules.from_checkpoint(checkpoint, identity.vision.architecture, identity.rules)
    model_config = EngineArgs(model=str(checkpoint), dtype="float32").create_model_config()
    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    loader = get_video_processor_cls_name(model_config)
    for data, options in VIDEOS:
        url = f"data:video/{'jpeg' if data.startswith(b'/9j/') else 'mp4'};base64,"
        url += data.decode() if data.startswith(b"/9j/") else base64.b64encode(data).decode()
        video = MediaConnector(media_io_kwargs={"video": options}).fetch_video(url, video_processor=loader)
        items = processor.info.parse_mm_data({"video": [getattr(video, "media", video)]})
        result = processor._apply_hf_processor(ProcessorInputs([], items), TimingContext(enabled=False))
        found = result if hasattr(result, "kwargs") else result[1]  # before vLLM 0.32
        [expected], [expected_updates] = found.kwargs["video"], found.prompt_updates["video"]

        plan = VideoPlan.make(read_header(data), rules, VideoBounds(), **options)
        item, updates = cache_item(plan.header("ab" * 32), processor)
        kept = {name: element.data for name, element in expected.items() if element.field.keep_on_cpu}
        assert item.keys() - {CHUNKS} == kept.keys(), options
        for name, value in kept.items():
            ours = item[name].data
            assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value, (name, options)
        assert len(updates) == len(expected_updates) == 1
        for ours, theirs in zip(updates, expected_updates, strict=True):
            assert (ours.mode, ours.target, ours.content.full) == (theirs.mode, theirs.target, theirs.content.full)
        assert expected["pixel_values_videos"].data.shape[0] == plan.num_tokens * identity.rules.merge_size**2


def make_renderer(prefix_caching: bool) -> Any:
    args = EngineArgs(
        model=str(SCENES),
        dtype="float32",
        enforce_eager=True,
        mm_processor_cache_gb=0,
        enable_prefix_caching=prefix_caching,
    )
    return renderer_from_config(args.create_engine_config())


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def conversation(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [
        {"role": "user", "content": [parts[0], {"type": "text", "text": "And this?"}, *parts[1:]]},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": "Sure?"},
    ]


def rendered(renderer: Any, *urls: str, **options: Any) -> Any:
    """The prompt as vLLM's engine gets it."""
    render = renderer.render_chat_async([conversation(*urls)], ChatParams(), **options)
    return asyncio.run(render)[1][0]


def positions(prompt: Any) -> list[tuple[int, int, object]]:
    return [(each.offset, each.length, each.is_embed) for each in prompt["mm_placeholders"]["image"]]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def renderers(request: pytest.FixtureRequest) -> tuple[Any, Any, References]:
    """vLLM's own, ours, and the latter's references."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    ours, references = make_renderer(request.param), References()
    MEDIA_CONNECTOR_REGISTRY.register("references")(make_connector(references))
    install_references(ours, references)
    return make_renderer(request.param), ours, references


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "references")


@pytest.fixture
def processed(renderers: tuple[Any, Any, References], monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of the HF processor of our renderer with images. vLLM before 0.32 calls it with a text alone as well."""
    calls: list[object] = []
    processor = renderers[1].mm_processor
    call = processor._call_hf_processor

    def recorded(*args: object, **kwargs: object) -> object:
        if args or kwargs["mm_data"]:
            calls.append(args)
        return call(*args, **kwargs)

    monkeypatch.setattr(processor, "_call_hf_processor", recorded)
    return calls


@pytest.mark.parametrize("skip_mm_cache", [False, True])
def test_references_render_to_vllms_own_prompt(
    renderers: tuple[Any, Any, References],
    connected: Callable[[], None],
    processed: list[object],
    skip_mm_cache: bool,
) -> None:
    """Two images, one of them twice; `/tokenize` renders with `skip_mm_cache`."""
    theirs, ours, references = renderers
    images = [picture(320, 192), picture(1280, 800, "blue")]
    images.append(images[0])
    expected = rendered(theirs, *map(data_url, images), skip_mm_cache=skip_mm_cache)

    connected()
    identity = identity_of(SCENES)
    headers = [
        identity.header(identity.digest(image, None), image_grid(*image.size, identity.rules)) for image in images
    ]
    keys = [references.add(header) for header in headers]
    prompt = rendered(ours, *keys, skip_mm_cache=skip_mm_cache)
    assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]
    assert positions(prompt) == positions(expected)
    assert prompt["mm_hashes"] == {"image": [header.digest for header in headers]}
    fields = [item.get_data() for item in prompt["mm_kwargs"]["image"]]
    assert [list(field) for field in fields] == [["image_grid_thw"]] * 3
    for field, reference in zip(fields, expected["mm_kwargs"]["image"], strict=True):
        assert torch.equal(field["image_grid_thw"], reference["image_grid_thw"].data)
    assert processed == []
    assert rendered(ours, *keys)["prompt_token_ids"] == expected["prompt_token_ids"], "a tool loop renders again"
    references.release(keys)
    with pytest.raises(UnknownReferenceError):
        rendered(ours, *keys, skip_mm_cache=skip_mm_cache)
    assert processed == []


def test_a_stand_in_is_never_processed(
    renderers: tuple[Any, Any, References], connected: Callable[[], None], processed: list[object]
) -> None:
    """Neither if its header is gone by the time of the render, nor where a processor bypasses the cache."""
    _, ours, references = renderers
    connected()
    key = references.add(identity_of(SCENES).header("cd" * 32, (1, 8, 8)))
    stand_in = make_connector(references)().fetch_image(key)
    references.release([key])
    with pytest.raises(UnknownReferenceError):
        ours._process_multimodal([1, 954], {"image": [stand_in]}, {"image": ["mine"]}, None, {})
    items = ours.mm_processor.info.parse_mm_data({"image": [stand_in]})
    with pytest.raises(FetchRefusedError):
        ours.mm_processor._apply_hf_processor(ProcessorInputs([954], items), TimingContext(enabled=False))
    with pytest.raises(FetchRefusedError):
        ours._process_multimodal([1, 954], {"image": [picture(9, 9)]}, None, None, {})
    assert processed == []
