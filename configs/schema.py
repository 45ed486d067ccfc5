"""The operator's choices: every key that `args:` of serve_config.yaml may hold, checked by arithmetic only.

Facts about a checkpoint are read from the checkpoint and do not appear here. This module must not know of Ray, torch or
vLLM; the names in `llm.engine_args` are vLLM's own and are checked where vLLM is importable.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from configs.encoder_config import EncoderConfig

GIB = 1024**3
MIB = 1024**2

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
LoadBound = Annotated[float, Field(ge=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
GpuCount = Literal["auto"] | NonNegativeFloat


class Options(BaseModel):
    """Frozen settings that refuse an unknown key and name the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: object) -> object:
        return known_keys_only(values, cls)


def section_fields(section: object) -> dict[str, object] | None:
    """Names and types of the keys of a section, a pydantic model or a dataclass; None for anything else."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    if isinstance(section, type) and dataclasses.is_dataclass(section):
        types = get_type_hints(section)
        return {field.name: types[field.name] for field in dataclasses.fields(section)}
    return None


def known_keys_only(values: object, section: type) -> object:
    """`values`. Raises `ValueError` where it is a mapping with a key that `section` does not have."""
    known = list(section_fields(section) or ())
    for key in values if isinstance(values, dict) else ():
        if key not in known:
            raise ValueError(unknown_key(str(key), known))
    return values


def unknown_key(key: str, known: list[str]) -> str:
    """The sentence that refuses `key`, with the nearest of the `known` names where one is near."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class EncoderReplicaConfig(Options):
    """What an encoder replica takes from its node, and what it bounds."""

    num_gpus: GpuCount = "auto"
    """ "auto": one GPU where the cluster has GPUs or can get them, else none. A fraction shares the GPU."""
    num_cpus: NonNegativeFloat = 0.5
    """What Ray sets aside of the node's CPUs; the decode workers come on top."""
    accelerator_type: str | None = None
    """Ray's name of a GPU type, such as "A100" or "H100"."""
    decode_workers: PositiveInt = 2
    """Processes that decode images, and resize them where there is no GPU to do it."""
    decode_timeout_s: PositiveFloat = 20.0
    """An image that takes longer is refused and its worker process replaced."""
    shared_pixel_bytes: PositiveInt = 256 * MIB
    """Shared memory in which decoded images wait for the encoder, pinned where that is on a GPU. An image that finds no
    room there comes through a pipe."""
    decode_memory_bytes: PositiveInt = 2 * GIB
    """What one image may take in its worker process; one that takes more is refused."""
    shared_embedding_bytes: PositiveInt = 4 * GIB
    """Shared memory in which embeddings lie for the language models of the same host, the cache's too, which give way;
    pinned where the encoder is on a GPU. What finds no room there goes through Ray's object store."""
    cache_bytes: Annotated[int, Field(ge=0)] = 2 * GIB
    """Bound of the embedding cache in host memory; 0 switches it off."""
    max_queued_tokens: PositiveInt = 262_144
    """Merged tokens that may wait for the GPU; what comes on top is refused with 503."""
    affinity: bool = True
    """An image goes to the replica that holds its embedding, else always to the same one. Off: to the one with fewer
    calls of two by chance, as Serve does."""
    load_bound: LoadBound = 1.25
    """What a replica has to encode, in visual tokens, may be so many times the mean, and so may what it has to give of
    its cache; an image that would go to one with more goes to another. Each ingress replica counts what it has sent."""


class LLMConfig(Options):
    """The vLLM replicas. `engine_args` and `server_args` are vLLM's own names, without the dashes."""

    num_gpus: GpuCount = "auto"
    """ "auto": tensor_parallel_size GPUs where the cluster has GPUs or can get them, else none."""
    num_cpus: NonNegativeFloat = 1.0
    """What Ray sets aside of the node's CPUs."""
    accelerator_type: str | None = None
    """Ray's name of a GPU type, such as "A100" or "H100"."""
    engine_args: dict[str, JsonValue] = {}
    """Fields of vLLM's AsyncEngineArgs, for instance max_model_len."""
    server_args: dict[str, JsonValue] = {}
    """Options of `vllm serve` beside the engine's, for instance tool_call_parser or chat_template."""
    landing_bytes: PositiveInt = 2 * GIB
    """Memory that embeddings of encoders on other hosts are read into by NIXL, pinned where there is a GPU. It bounds
    what is in flight; what finds no room in time goes through Ray's object store."""
    cpu_kv_cache_gib: PositiveInt = 1
    """KV-cache size of a replica without a GPU."""
    affinity: bool = True
    """Turns of one conversation go to one replica, whose prefix cache holds the turns before. Off: as Serve does."""
    load_bound: LoadBound = 1.25
    """What a replica has under way, in requests, may be so many times the mean; a conversation whose replica has more
    goes to another, and stays there."""
    ask_from_tokens: PositiveInt | None = 2048
    """Before a prompt of at least so many tokens, three replicas are asked what they have to read; it goes to the one
    that will have read it first, its prefix cache counted. `null`: by `load_bound` alone, as shorter ones."""
    begin_from_tokens: PositiveInt | None = 1024
    """vLLM is given a request while its images are still being encoded, and reads the prompt as soon as it can read at
    least so many tokens, up to the first image that is not there. `null`: once all of them are."""
    fallback: Literal["none", "local"] = "none"
    """Images while no encoder is there. "none": they wait for one, and are a 503 once Serve has given up starting one.
    "local": the replica loads the vision tower beside the language model, at the first such image, and encodes by
    itself, one image at a time, without graphs."""
    fallback_after_s: PositiveFloat = 10.0
    """For how long no encoder is there before "local" begins. Where encoders scale to zero, more than one takes to
    start."""
    fallback_max_images: PositiveInt = 16
    """Images that wait at one replica for its own encoding, that under way included; more is a 503. One request is
    taken whatever it has."""


class FetchConfig(Options):
    """How the ingress fetches `http(s)` image URLs; `data:` URLs need no fetching."""

    http: bool = False
    """Off: a URL other than `data:` is refused. On: public addresses may be fetched."""
    allowed_domains: tuple[str, ...] = ()
    """Where set, only these host names and their subdomains."""
    allow_private_addresses: bool = False
    """Also loopback and private addresses, for closed networks. Link-local, metadata, multicast and reserved ones stay
    closed."""
    timeout_s: PositiveFloat = 10.0
    """For the whole fetch, redirects included."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """Each hop's address is checked again."""
    max_concurrent: PositiveInt = 64
    """Fetches under way at once in one ingress replica."""
    max_concurrent_per_client: PositiveInt = 16
    """Of these, how many one API key may have, or one address where there are no keys; more wait."""


class DoorConfig(Options):
    """Who may ask, and how much."""

    authentication: Literal["auto", "keys", "none"] = "auto"
    """ "auto": API keys where there are any; without them the server starts only where it listens on loopback. "none":
    whoever reaches it may ask; for a server behind something that authenticates."""
    api_keys_file: str | None = None
    """A file with `NAME KEY` or `NAME sha256:HASH` a line, on the nodes of the ingress; read again when it changes."""
    api_keys_variable: str | None = None
    """The environment variable that holds such lines, for keys that change with a restart only."""
    tenant_header: str | None = None
    """A header by which what authenticates before this server names the tenant; beside the key's name it separates
    caches and quotas. Never one that clients may set themselves."""
    requests_per_minute: PositiveInt | None = None
    """Of one key's name and tenant, or of one address where there are neither, at one ingress replica; more is a
    429."""
    visual_tokens_per_minute: PositiveInt | None = None
    """Likewise, of all images together."""
    management_routes: Literal["auto", "open", "closed"] = "auto"
    """/metrics, /load, /version, /docs, /openapi.json, /cluster. "auto": open where the server listens on loopback."""
    max_header_bytes: PositiveInt = 32_768
    """Of a request's headers, path and query together; more is a 431."""

    @model_validator(mode="after")
    def _keys_have_a_source(self) -> DoorConfig:
        if self.authentication == "keys" and not (self.api_keys_file or self.api_keys_variable):
            raise ValueError('authentication: "keys" needs api_keys_file or api_keys_variable')
        if self.authentication == "none" and (self.api_keys_file or self.api_keys_variable):
            raise ValueError('authentication: "none" would ignore api_keys_file and api_keys_variable')
        return self


class IngressConfig(Options):
    """What the front door accepts."""

    num_cpus: NonNegativeFloat = 0.1
    """What Ray sets aside of the node's CPUs."""
    max_body_bytes: PositiveInt = 64 * MIB
    """Of a request's body as it comes in; more is a 413."""
    max_image_bytes: PositiveInt = 20 * MIB
    """Of one image file; more is a 413."""
    max_image_pixels: PositiveInt = 64_000_000
    """Width times height as the header states it, checked before decoding."""
    image_formats: Annotated[tuple[ImageFormat, ...], Field(min_length=1)] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    """What is decoded, told by content; of an animation the first frame. TIFF has to be asked for."""
    min_image_side: PositiveInt = 1
    """In pixels, as the header states it; a smaller image is a 400."""
    max_image_side: PositiveInt = 32_768
    """In pixels, as the header states it; a larger image is a 400."""
    max_images_per_request: PositiveInt = 16
    """In all messages together; more is a 400."""
    max_answers_per_request: PositiveInt = 128
    """`n` times the number of prompts; more is a 400."""
    max_visual_tokens_per_image: PositiveInt = 16_384
    """After resizing; also bounds what `min_pixels` may enlarge an image to."""
    max_visual_tokens_per_request: PositiveInt = 65_536
    """Of all images together, counted from their headers before anything is decoded; more is a 400."""
    max_whereabouts: Annotated[int, Field(ge=0)] = 65_536
    """Of so many embeddings an ingress replica remembers where in an encoder's memory they lie: the next request with
    the same image asks no encoder. 0: encoders are always asked."""
    by_grpc: bool = True
    """Whether requests go to language models by Serve's gRPC where they can: half the time of a call by Ray. It listens
    on ports of the system's choice; false where nodes do not reach each other on those."""
    low_detail_max_pixels: PositiveInt = 512 * 512
    """What `"detail": "low"` resizes an image to at most; "high" and "auto" take the checkpoint's bounds."""
    max_requests_waiting: PositiveInt = 512
    """Requests at one ingress replica that no language model has accepted yet; more is a 503. At most the LLM's
    `max_queued_requests`."""
    max_visual_tokens_in_flight: PositiveInt = 131_072
    """From an image's turn at one ingress replica until a language model has its embedding; more wait in line, small
    requests before large ones that came shortly before. An H200 encodes as many in 1 to 1.5 s; their embeddings are 4
    GiB for Qwen3-VL-8B."""
    max_images_in_flight: PositiveInt = 1024
    """Likewise, for images too small to count by tokens. At most the Encoder's `max_queued_requests`."""
    max_visual_tokens_waiting: PositiveInt = 524_288
    """Of the requests in line at one ingress replica; more is a 503."""
    request_timeout_s: PositiveFloat = 600.0
    """From the request's arrival to its last token. A client asks for less with the header `x-request-timeout-s`."""
    hedge_after_s: PositiveFloat | None = None
    """Where set, an image that no encoder has ready so long after the request asked for it is sent to a second one,
    once; the slower of the two is cancelled. The p99 of that time keeps these to one in a hundred."""
    retry_after_s: PositiveInt = 2
    """The least Retry-After of a 503."""
    max_retry_after_s: PositiveInt = 30
    """The most: an overloaded server tells the time that its backlog takes at the speed measured of late."""
    page: bool = True
    """The page at `/`, which asks about pictures and shows where the time went."""
    fetch: FetchConfig = FetchConfig()
    door: DoorConfig = DoorConfig()

    @model_validator(mode="after")
    def _the_largest_request_fits(self) -> IngressConfig:
        for most, largest in (
            ("max_visual_tokens_in_flight", "max_visual_tokens_per_request"),
            ("max_images_in_flight", "max_images_per_request"),
            ("max_retry_after_s", "retry_after_s"),
        ):
            if getattr(self, most) < getattr(self, largest):
                raise ValueError(f"{most} is {getattr(self, most)}, less than {largest}, {getattr(self, largest)}")
        return self


class AppConfig(Options):
    """Everything under `args:` of serve_config.yaml."""

    model: Annotated[str, Field(min_length=1)] = "auto"
    """A checkpoint folder or a hub name; "auto" is the small shipped model where the cluster has no
    GPU and cannot get one."""
    transfer: Literal["auto", "object_store", "shared_memory", "nixl"] = "auto"
    """How embeddings go to the language model. "auto": from an encoder's shared memory where the language models are on
    its host, and into vLLM's engine without passing through the request where this vLLM can do that; between hosts
    by NIXL where it is installed and a trial found it faster, else through Ray's object store. "shared_memory" fails at
    the start where the engine cannot, "nixl", which is for encoders of the same host too, where NIXL cannot be used."""
    encoder: EncoderConfig = EncoderConfig()
    encoder_replica: EncoderReplicaConfig = EncoderReplicaConfig()
    llm: LLMConfig = LLMConfig()
    ingress: IngressConfig = IngressConfig()

    @field_validator("encoder", mode="before")
    @classmethod
    def _refuse_unknown_encoder_keys(cls, values: object) -> object:
        return known_keys_only(values, EncoderConfig)
