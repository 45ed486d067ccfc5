"""Keys work once, and vLLM gets no media in any other way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest
import torch

from deployments.common.messages import KEY_PREFIX, new_key
from deployments.vllm.media_connector import (
    FetchRefusedError,
    KeyedMediaConnector,
    KeyStore,
    UnknownKeyError,
    make_connector_class,
)

TENSOR = torch.arange(6.0)
BY_KEY = {"fetch_image_embedding", "fetch_image_embedding_async"}


def vllms_fetch_methods() -> Iterator[str]:
    """Public methods of the installed vLLM's own connector by which media can come in."""
    from vllm.multimodal.media import MediaConnector

    for name, _ in inspect.getmembers(MediaConnector, callable):
        if name.startswith(("fetch_", "load_")):
            yield name


def called(connector: KeyedMediaConnector, method: str, *arguments: object) -> object:
    result = getattr(connector, method)(*arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def test_keys_are_unguessable() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(key.startswith(KEY_PREFIX) and len(key) >= len(KEY_PREFIX) + 22 for key in keys), "128 bits in base64"


def test_a_key_works_once() -> None:
    store = KeyStore()
    store.put("a", TENSOR)
    assert store.pop("a") is TENSOR
    with pytest.raises(UnknownKeyError):
        store.pop("a")
    assert len(store) == 0


def test_a_key_in_use_is_not_overwritten() -> None:
    store = KeyStore()
    store.put("a", TENSOR)
    with pytest.raises(ValueError, match="already in use"):
        store.put("a", torch.zeros(1))
    assert store.pop("a") is TENSOR


def test_withdrawn_keys_are_gone_and_taken_ones_may_be_withdrawn() -> None:
    store = KeyStore()
    store.put("a", TENSOR)
    store.put("b", TENSOR)
    store.pop("a")
    store.discard(["a", "b", "never put"])
    assert len(store) == 0
    with pytest.raises(UnknownKeyError):
        store.pop("b")


def test_an_unknown_key_is_a_value_error_that_names_no_key() -> None:
    """vLLM answers ValueError with 400 and its text: it must not tell whether, or which, keys exist."""
    store = KeyStore()
    store.put("vitray:secret", TENSOR)
    with pytest.raises(ValueError, match="does not exist") as refused:
        store.pop("vitray:guess")
    assert "guess" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("method", sorted(BY_KEY))
def test_embeddings_come_by_key_only(method: str) -> None:
    store = KeyStore()
    connector = make_connector_class(store)()
    store.put("key", TENSOR)
    assert called(connector, method, "key") is TENSOR
    for other in ("key", "data:;base64,AAAA", "https://example.com/tensor.pt", "file:///etc/passwd"):
        with pytest.raises(UnknownKeyError):
            called(connector, method, other)


def test_the_installed_vllm_has_fetch_methods_to_refuse() -> None:
    found = set(vllms_fetch_methods())
    assert {"load_from_url", "load_from_url_async", "fetch_image", "fetch_image_async", "fetch_video"} <= found
    assert "fetch_image_embedding" in found, "the method that embeddings come through"


def test_every_fetch_method_of_vllms_own_connector_is_refused() -> None:
    """One that ours lacks would be an AttributeError, a status 500 instead of 400; one that fetches would be a hole."""
    store = KeyStore()
    store.put("key", TENSOR)
    connector = make_connector_class(store)()
    for method in {*vllms_fetch_methods()} - BY_KEY:
        assert hasattr(connector, method), f"vLLM's connector has {method}, ours must refuse it"
        assert inspect.iscoroutinefunction(getattr(connector, method)) == method.endswith("_async"), method
        for source in ("key", "https://example.com/cat.png", "data:image/png;base64,AAAA"):
            with pytest.raises(FetchRefusedError):
                called(connector, method, source)
    assert len(store) == 1


def test_no_public_method_beyond_vllms_own_gives_anything() -> None:
    public = {name for name, _ in inspect.getmembers(KeyedMediaConnector, callable) if not name.startswith("_")}
    assert public - BY_KEY == {
        name
        for name in public
        if getattr(KeyedMediaConnector, name) in (KeyedMediaConnector._refuse, KeyedMediaConnector._refuse_async)
    }


def test_connectors_of_two_stores_do_not_share() -> None:
    one, other = KeyStore(), KeyStore()
    one.put("key", TENSOR)
    with pytest.raises(UnknownKeyError):
        make_connector_class(other)(media_io_kwargs={}).fetch_image_embedding("key")
