"""Prints the answers of one real engine as JSON: `python -m tests.models.ask_engine alone|served CHECKPOINT FOLDER`.

FOLDER has the pictures, `<name>.png`. For `served` it also has their headers, and their embeddings, one of which is
there only while the engine waits for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from deployments.vllm import import_shim

QUESTIONS = {"two pictures, one twice": ("first", "second", "first"), "one picture": ("first",), "another": ("other",)}
LATE_S = 1.0
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 128,
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,
    "distributed_executor_backend": "uni",
    "worker_extension_cls": "tests.models.folder_connector.TowerReport",
}


async def answers(checkpoint: str, folder: Path, *, served: bool) -> dict[str, Any]:
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import ChatParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = dict(ENGINE_ARGS)
    if served:
        arguments["ec_transfer_config"] = ECTransferConfig(
            ec_connector="FolderConnector",
            ec_connector_module_path="tests.models.folder_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config={"folder": str(folder)},
        )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=checkpoint, **arguments))
    try:
        engine.renderer.warmup(ChatParams())
        urls = reference_urls(engine, folder) if served else data_urls(folder)
        if served:
            asyncio.get_running_loop().call_later(LATE_S, deliver, folder)
        found = {name: await answer(engine, [urls[one] for one in asked]) for name, asked in QUESTIONS.items()}
        return {"answers": found, "tower": (await engine.collective_rpc("tower_devices"))[0]}
    finally:
        engine.shutdown()


def deliver(folder: Path) -> None:
    for late in folder.glob("*.late"):
        late.rename(late.with_suffix(".pt"))


def data_urls(folder: Path) -> dict[str, str]:
    files = folder.glob("*.png")
    return {file.stem: "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode() for file in files}


def reference_urls(engine: Any, folder: Path) -> dict[str, str]:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from deployments.vllm.references import References
    from deployments.vllm.renderer import install_references, make_connector_class

    references = References()
    MEDIA_CONNECTOR_REGISTRY.register("references")(make_connector_class(references))
    os.environ["VLLM_MEDIA_CONNECTOR"] = "references"
    install_references(engine.renderer, references)
    headers = pickle.loads((folder / "headers.pickle").read_bytes())
    return {name: references.add(header) for name, header in headers.items()}


async def answer(engine: Any, urls: list[str]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.renderers import ChatParams

    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in the picture?"}]}]
    _, (prompt,) = await engine.renderer.render_chat_async([messages], ChatParams())
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=1, ignore_eos=True)
    last = None
    async for output in engine.generate(prompt, sampling, str(len(urls)) + urls[0][-8:]):
        last = output
    assert last is not None
    chosen = last.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    return {"prompt": list(last.prompt_token_ids), "tokens": list(chosen.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    import_shim.activate()
    print(json.dumps(asyncio.run(answers(sys.argv[2], Path(sys.argv[3]), served=sys.argv[1] == "served"))))
