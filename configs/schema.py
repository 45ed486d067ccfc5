"""The operator's settings: every key that `args:` of serve_config.yaml may hold, validated by arithmetic only.

Facts about a checkpoint are not settings; they are read from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from configs.encoder_config import EncoderConfig
from configs.renamed import describe_former_key

GIB = 1024**3
MIB = 1024**2

PositiveInt = Annotated[int, Field(gt=0)]
Port = Annotated[int, Field(gt=0, le=65_535)]
PositiveFloat = Annotated[float, Field(gt=0)]
LoadFactor = Annotated[float, Field(ge=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]


LEAST_SHARE = 0.0001
"""Ray's precision of a count of GPUs or CPUs."""


def _check_gpu_count(gpus: str | float) -> str | float:
    """Raises ValueError for counts that Ray refuses when it starts a replica."""
    if isinstance(gpus, str):
        return gpus
    if gpus > 1 and gpus % 1:
        raise ValueError(f"must be a whole number above 1, got {gpus:g}")
    return _check_cpu_count(gpus)


def _check_cpu_count(cpus: float) -> float:
    """Raises ValueError for counts that Ray refuses when it starts a replica."""
    if 0 < cpus < LEAST_SHARE:
        raise ValueError(f"must be 0 or at least {LEAST_SHARE}, got {cpus}")
    return cpus


GpuCount = Annotated[Literal["auto"] | NonNegativeFloat, AfterValidator(_check_gpu_count)]
CpuCount = Annotated[NonNegativeFloat, AfterValidator(_check_cpu_count)]
BufferBytes = Annotated[int, Field(gt=0, le=2**44)]  # the address space of a process is 2**47 bytes


class Options(BaseModel):
    """Base class of the sections: frozen, and unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: object) -> object:
        return check_known_keys(values, list(cls.model_fields))


def check_known_keys(values: object, known: list[str]) -> object:
    """Returns `values`. Raises ValueError if it is a mapping with a key that is not `known`."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key not in known:
            raise ValueError(unknown_key_message(str(key), known, value))
    return values


def unknown_key_message(key: str, known: list[str], value: object = None) -> str:
    """Returns the error message for `key`: its new name, why it was removed, or the nearest of the `known` names."""
    if (former := describe_former_key(key, value)) is not None:
        return f"unknown key {key!r}: {former}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}: {hint}"


class EncoderReplicaConfig(Options):
    """Resources and limits of the encoder replicas."""

    num_gpus: GpuCount = "auto"
    """GPUs of a replica. "auto": one if the cluster has GPUs or can get them, else none. A fraction shares a GPU."""
    num_cpus: CpuCount = 0.5
    """CPUs that Ray reserves for a replica; the decode workers are not included."""
    accelerator_type: str | None = None
    """Ray's name of a GPU type, such as "A100" or "H100"."""
    decode_workers: PositiveInt = 2
    """Processes that decode images, and resize them if the encoder has no GPU; with `encoder.implementation: none`,
    threads of a language model that decode images."""
    decode_timeout_s: PositiveFloat = 20.0
    """Seconds to decode an image; a slower one is refused and its worker process replaced."""
    pixel_shm_bytes: BufferBytes = 256 * MIB
    """Shared memory for decoded images on their way to the encoder, pinned if the encoder is on a GPU. When it is full,
    images are sent through a pipe."""
    decode_memory_bytes: PositiveInt = 2 * GIB
    """Memory that one image may use in its worker process; an image that needs more is refused. With
    `encoder.implementation: none`, memory for the pixels of all images that wait for the engine of a language model: a
    request whose images need more alone is refused with 413."""
    embedding_shm_bytes: BufferBytes = 4 * GIB
    """Shared memory for embeddings that language models of the same host read, cached embeddings included, which are
    evicted first; pinned if the encoder is on a GPU. When it is full, embeddings are read by TCP from the replica's
    own memory, of which as many bytes may be used."""
    cache_bytes: Annotated[int, Field(ge=0)] = 2 * GIB
    """Bytes of the embedding cache in host memory; 0 switches it off."""
    max_queued_tokens: PositiveInt = 262_144
    """Visual tokens that may wait for the GPU; images beyond that are rejected with 503."""
    affinity: bool = True
    """Route an image to the replica that it was sent to last, else to the one its digest hashes to, on the host of its
    language model first. If false, the replica with the fewest tokens in flight from the same ingress replica is
    chosen, on that host first."""
    affinity_load_factor: LoadFactor = 1.25
    """Bounded loads: a replica's visual tokens in flight may be at most this many times the mean of all replicas, or as
    many over the mean as twice the image has; counted separately for tokens to encode and cached tokens to send. An
    image whose replica has more is routed to another. Each ingress replica counts its own calls."""


class LLMConfig(Options):
    """The vLLM replicas. Keys of `engine_args` and `server_args` are vLLM's option names without the dashes."""

    num_gpus: GpuCount = "auto"
    """GPUs of a replica. "auto": tensor_parallel_size times pipeline_parallel_size if the cluster has GPUs or can get
    them, else none."""
    num_cpus: CpuCount = 1.0
    """CPUs that Ray reserves for a replica."""
    accelerator_type: str | None = None
    """Ray's name of a GPU type, such as "A100" or "H100"."""
    engine_args: dict[str, JsonValue] = {}
    """Fields of vLLM's AsyncEngineArgs, for instance max_model_len. Limits of batches that are not given are those of
    `vllm serve`."""
    server_args: dict[str, JsonValue] = {}
    """Options of `vllm serve` other than the engine's, for instance tool_call_parser or chat_template."""
    receive_buffer_bytes: BufferBytes = 4 * GIB
    """Receive buffer for embeddings read by TCP or NIXL, pinned once the first one arrives if the replica has a
    GPU. It holds those of all requests until their answers end; a request whose embedding does not fit in time is
    retried."""
    cpu_kv_cache_gib: PositiveInt = 1
    """KV-cache size of a replica without a GPU."""
    affinity: bool = True
    """Route the turns of a conversation to one replica, whose prefix cache holds the earlier turns. If false, the
    replica with the fewest requests in flight from the same ingress replica is chosen."""
    affinity_load_factor: LoadFactor = 1.25
    """Bounded loads: a replica's requests in flight may be at most this many times the mean, or two over the mean; a
    conversation whose replica has more moves to another, and stays there for the same ingress replica."""
    load_probe_min_tokens: PositiveInt | None = 2048
    """Prompts of at least this many tokens are routed by load: up to three candidate replicas of the conversation's
    host and two of others report their pending prefill tokens, and the one expected to finish prefill first is chosen,
    counting prefix-cache hits and, on another host, images of earlier turns. `null`: all prompts are routed by
    affinity."""
    early_prefill_min_tokens: PositiveInt | None = 1024
    """Early prefill: vLLM gets a request while its images are still being encoded, and prefills up to the first missing
    image as soon as that is at least this many tokens. `null`: vLLM gets a request once all embeddings have arrived."""


class FetchConfig(Options):
    """How the ingress fetches `http(s)` image URLs; `data:` URLs need no fetching."""

    http: bool = False
    """Fetch images from public http(s) addresses. If false, only `data:` URLs are accepted."""
    allowed_domains: tuple[str, ...] = ()
    """If set, only these host names and their subdomains are fetched from."""
    allow_private_addresses: bool = False
    """Allow loopback and private addresses too, for closed networks. Link-local, metadata, multicast and reserved
    addresses stay blocked."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for a whole fetch with its redirects."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """Redirects of one fetch; each one's address is checked again."""
    max_bytes_per_request: PositiveInt = 320 * MIB
    """Bytes of all files that are fetched for a request, those of earlier turns too; more are rejected with 413."""
    max_concurrent: PositiveInt = 64
    """Concurrent fetches in one ingress replica."""
    max_concurrent_per_client: PositiveInt = 16
    """Concurrent fetches of one API key, or of one address without keys; further ones wait."""

    @model_validator(mode="after")
    def _check_allowed_domains_are_host_names(self) -> FetchConfig:
        for domain in self.allowed_domains:
            if not re.fullmatch(r"[A-Za-z0-9_:-][A-Za-z0-9_.:-]*", domain) or domain.count(":") == 1:
                raise ValueError(
                    f"allowed_domains has {domain!r}, which no URL's host matches; write host names, such as "
                    "example.org (and xn--bcher-kva.example for bücher.example)"
                )
        return self


class AuthConfig(Options):
    """Authentication, and access to management routes."""

    mode: Literal["auto", "keys", "none"] = "auto"
    """Who may use the server. "auto": clients with an API key if keys are set; without keys the server starts only if
    it listens on loopback. "keys": clients with an API key; keys must be set. "none": any client that can reach the
    server, for servers behind an authenticating proxy."""
    api_keys_file: Annotated[str, Field(min_length=1)] | None = None
    """A file with a line `NAME KEY` or `NAME sha256:HASH` for each key, on the nodes of the ingress; it is read again
    when it changes."""
    api_keys_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable that holds such lines; changed keys need a restart."""
    tenant_header: Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")] | None = None
    """The header in which an authenticating proxy names the tenant; with the key's name it separates caches and rate
    limits. Clients must not be able to set it."""
    management_routes: Literal["auto", "open", "closed"] = "auto"
    """Access to /metrics, /load, /version, /docs, /openapi.json and /cluster. "auto": open if the server listens on
    loopback."""

    @model_validator(mode="after")
    def _check_keys_have_a_source(self) -> AuthConfig:
        if self.mode == "keys" and not (self.api_keys_file or self.api_keys_env):
            raise ValueError('mode: "keys" needs api_keys_file or api_keys_env')
        if self.mode == "none" and (self.api_keys_file or self.api_keys_env):
            raise ValueError('mode: "none" would ignore api_keys_file and api_keys_env')
        return self


class RateLimitConfig(Options):
    """Rate limits at one ingress replica. A client is a key and tenant, or an address without them."""

    requests_per_minute: PositiveInt | None = None
    """Requests that one client (its key and tenant, or its address) may send in a minute; more are rejected with
    429."""
    visual_tokens_per_minute: PositiveInt | None = None
    """Visual tokens of all images that one client (its key and tenant, or its address) may send in a minute; more are
    rejected with 429."""


class AudioConfig(Options):
    """Limits of sounds, which vLLM's own classes of models encode."""

    max_bytes: PositiveInt = 25 * MIB
    """Bytes of one audio file; a larger one is rejected with 413."""
    max_seconds: PositiveFloat = 600.0
    """Duration of a sound; a longer one is rejected with 400: by its header, and again when it is decoded."""
    max_samples: PositiveInt = 64 * MIB
    """Samples of a sound's channels together, each 4 bytes once decoded; more are rejected with 400."""
    max_per_request: PositiveInt = 8
    """Sounds after the last answer in a request's messages; more are rejected with 400."""


class VideoConfig(Options):
    """Limits of videos."""

    max_bytes: PositiveInt = 40 * MIB
    """Bytes of one video file, or of a list of frames; a larger one is rejected with 413."""
    max_seconds: PositiveFloat = 600.0
    """Duration of a video as its file states it; a longer one is rejected with 400."""
    max_frames: PositiveInt = 128
    """Frames that are sampled from a video; a request that asks for more, or a model that takes more by itself, is
    rejected with 400."""
    max_pixels_per_frame: PositiveInt = 1920 * 1200
    """Width times height of a video's frames; larger ones are rejected with 400."""
    max_per_request: PositiveInt = 4
    """Videos after the last answer in a request's messages; more are rejected with 400."""


class IngressConfig(Options):
    """Limits and features of the ingress."""

    num_cpus: CpuCount = 0.1
    """CPUs that Ray reserves for a replica."""
    max_body_bytes: PositiveInt = 64 * MIB
    """Bytes of a request's body; a larger one is rejected with 413."""
    max_image_bytes: PositiveInt = 20 * MIB
    """Bytes of one image file; a larger one is rejected with 413."""
    max_image_pixels: PositiveInt = 64_000_000
    """Width times height of an image by its header, checked before decoding."""
    image_formats: Annotated[tuple[ImageFormat, ...], Field(min_length=1)] = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    """Accepted formats, detected by content; of an animation, the first frame is decoded, and greyscale of 16 bits is
    cut off at 255, as by vLLM. TIFF is off by default."""
    min_image_side: PositiveInt = 1
    """Shorter side of an image in pixels by its header; a smaller one is rejected with 400."""
    max_image_side: PositiveInt = 32_768
    """Longer side of an image in pixels by its header; a larger one is rejected with 400."""
    max_images_per_request: PositiveInt = 16
    """Images after the last answer in a request's messages; more are rejected with 400."""
    max_earlier_images_per_request: PositiveInt = 512
    """Images, sounds and videos of earlier turns, before the last answer; more are rejected with 400. They are encoded,
    and count for rate limits and as in flight, only if vLLM's prefix cache does not cover them; without encoders, they
    always count."""
    max_completions_per_request: PositiveInt = 128
    """`n` times the number of prompts; more is rejected with 400."""
    max_visual_tokens_per_image: PositiveInt = 16_384
    """Visual tokens of an image after resizing; also limits the enlargement by `min_pixels`."""
    max_visual_tokens_per_request: PositiveInt = 65_536
    """Visual tokens of a request's images after the last answer, computed from their headers before decoding; more are
    rejected with 400."""
    embedding_directory_entries: Annotated[int, Field(ge=0)] = 65_536
    """Images that an ingress replica remembers, about 1 KB each, 2 KB with vLLM's encoder: size and location of the
    embedding in an encoder's memory, so that the next request with the same image needs no encoder. A video whose
    prompt is long counts as several. 0: every image goes to an encoder."""
    llm_transport: Literal["grpc", "ray"] = "grpc"
    """How requests are sent to language models. "grpc": by Serve's gRPC, which takes half the time of a Ray call,
    except requests over 2 MiB. It listens on ports that the operating system chooses. "ray": always by Ray, for nodes
    that cannot reach each other on those ports."""
    low_detail_max_pixels: PositiveInt = 512 * 512
    """Pixels to which `"detail": "low"` resizes an image at most; "high" and "auto" use the checkpoint's bounds."""
    max_requests_waiting: PositiveInt = 512
    """Requests at one ingress replica that no language model has accepted yet; more are rejected with 503. It must not
    exceed the LLM's `max_queued_requests`."""
    max_visual_tokens_in_flight: PositiveInt = 131_072
    """Visual tokens of admitted requests at one ingress replica, until a language model has the embedding; others are
    queued. An H200 encodes this many in 1 to 1.5 s; their embeddings take 4 GiB for Qwen3-VL-8B."""
    max_images_in_flight: PositiveInt = 1024
    """Images of admitted requests at one ingress replica, a bound for images with few tokens. It must not exceed the
    Encoder's `max_queued_requests`."""
    max_visual_tokens_queued: PositiveInt = 524_288
    """Visual tokens of all requests in one ingress replica's admission queue; more is rejected with 503."""
    max_bytes_held: PositiveInt = 2048 * MIB
    """Bytes of request bodies and image files at one ingress replica, each until its answer begins; more are rejected
    with 503."""
    stored_responses_bytes: Annotated[int, Field(ge=0)] = 256 * MIB
    """Bytes of stored responses of `/v1/responses` with their images, for `previous_response_id` and
    `/v1/responses/{id}`, in the memory of one process, the deployment `ResponseStore`. The least recently used are
    evicted first. 0: responses are not stored."""
    stored_responses_ttl_s: PositiveFloat = 86_400.0
    """Seconds after its last use until a stored response is deleted."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds from a request's arrival to its last token. A client may shorten it with the header
    `x-request-timeout-s`."""
    retry_after_s: PositiveInt = 2
    """Minimum of `Retry-After` of a 503."""
    max_retry_after_s: PositiveInt = 30
    """Maximum of `Retry-After`, which is the time that the backlog takes at the measured speed."""
    max_header_bytes: PositiveInt = 32_768
    """Bytes of a request's headers, path and query together; more is rejected with 431."""
    web_ui: bool = True
    """Serve the web page at `/`."""
    audio: AudioConfig = AudioConfig()
    video: VideoConfig = VideoConfig()
    fetch: FetchConfig = FetchConfig()
    auth: AuthConfig = AuthConfig()
    rate_limit: RateLimitConfig = RateLimitConfig()

    @model_validator(mode="after")
    def _check_largest_request_fits(self) -> IngressConfig:
        for total, largest in (
            ("max_visual_tokens_in_flight", "max_visual_tokens_per_request"),
            ("max_images_in_flight", "max_images_per_request"),
            ("max_bytes_held", "max_body_bytes"),
            ("max_retry_after_s", "retry_after_s"),
            ("max_image_side", "min_image_side"),
        ):
            if getattr(self, total) < getattr(self, largest):
                raise ValueError(f"{total} is {getattr(self, total)}, less than {largest}, {getattr(self, largest)}")
        return self

    def max_file_bytes(self, modality: str) -> int:
        """Returns the bound on the bytes of one file."""
        limits = {"audio": self.audio.max_bytes, "video": self.video.max_bytes}
        return limits.get(modality, self.max_image_bytes)

    def max_new_items(self, modality: str) -> int:
        """Returns the bound on the items of a request after the last answer."""
        limits = {"audio": self.audio.max_per_request, "video": self.video.max_per_request}
        return limits.get(modality, self.max_images_per_request)


class TcpConfig(Options):
    """Connections by which language models read embeddings from encoders of other hosts. Both ends authenticate; the
    embeddings are not encrypted."""

    listen_on: Annotated[str, Field(min_length=1)] | None = None
    """Address or network interface (`eth1`) on which encoder replicas listen. `null`: the address of their Ray node."""
    ports: tuple[Port, Port] | None = None
    """First and last port on which encoder replicas listen, one for each on a host. `null`: any free port."""
    secret_file: Annotated[str, Field(min_length=1)] | None = None
    """File on every node with the secret by which both ends authenticate, at least 32 bytes. `null`: the application
    creates one and keeps it in Ray's internal key-value store."""

    @model_validator(mode="after")
    def _check_order_of_ports(self) -> TcpConfig:
        if self.ports is not None and self.ports[0] > self.ports[1]:
            raise ValueError(f"ports are {self.ports[0]} to {self.ports[1]}: the first is over the last")
        return self


class AppConfig(Options):
    """All settings under `args:` of serve_config.yaml."""

    model: Annotated[str, Field(min_length=1)] = "auto"
    """Checkpoint folder or hub name. "auto": the small shipped model if the cluster has no GPU and cannot get one."""
    transfer: Literal["auto", "nixl"] = "auto"
    """How embeddings reach the language model. "auto": the engine loads them from shared memory of its host, where
    images are encoded if possible; between hosts they are read by TCP (`tcp`). "nixl": read by NIXL, on one host too,
    and an error at start-up if it cannot be used."""
    tcp: TcpConfig = TcpConfig()
    encoder: EncoderConfig = EncoderConfig()
    encoder_replica: EncoderReplicaConfig = EncoderReplicaConfig()
    llm: LLMConfig = LLMConfig()
    ingress: IngressConfig = IngressConfig()

    @field_validator("encoder", mode="before")
    @classmethod
    def _refuse_unknown_encoder_keys(cls, values: object) -> object:
        return check_known_keys(values, [field.name for field in dataclasses.fields(EncoderConfig)])
