"""`vitray check-config`: finds mistakes in a serve_config.yaml before anything is started.

Serve silently ignores keys that it does not know, so a misspelt one has no effect; here each is reported with its
location. Our own `args` are checked against configs/schema.py.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.renamed import describe_former_key
from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig, EncoderReplicaConfig, IngressConfig, LLMConfig, unknown_key_message
from deployments.cli.readiness import FEWER, Resource
from deployments.common import names
from deployments.ingress.auth.bind_address import bind_refusal
from deployments.vllm import compat

if TYPE_CHECKING:
    from ray.serve.schema import HTTPOptionsSchema

VISUAL_TOKEN_POLICY = "deployments.scaling:VisualTokenPolicy"
ENGINE_LOAD_POLICY = "deployments.scaling:EngineLoadPolicy"
POLICY_OF = {VISUAL_TOKEN_POLICY: names.ENCODER, ENGINE_LOAD_POLICY: names.LLM}
"""The deployment for which each of our scaling policies is made."""


class ConfigFileError(Exception):
    """The file cannot be read as a configuration."""


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML's last one would win, and aliases of a value inside that value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open_anchors: list[str | None] = []

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call] # PyYAML's
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and event.anchor in self._open_anchors:
            raise yaml.composer.ComposerError(
                problem=f"alias {event.anchor!r} is inside the value that it names", problem_mark=event.start_mark
            )
        self._open_anchors.append(None if is_alias else event.anchor)
        try:
            return super().compose_node(parent, index)
        finally:
            self._open_anchors.pop()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - PyYAML's
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_config(path: Path) -> dict[str, Any]:
    """Returns the parsed file. Raises ConfigFileError with a message that states the remedy."""
    try:
        parsed = _Loader(path.read_text()).get_single_data()
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date or a number
        raise ConfigFileError(f"{path}: not valid YAML: {error}") from error
    except (LookupError, AttributeError) as error:  # PyYAML's
        reason = "a value does not fit its tag, such as !!bool or !!int"
        raise ConfigFileError(f"{path}: not valid YAML: {reason}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("applications"), list):
        raise ConfigFileError(
            f"{path}: needs a list `applications:`; serve_config.yaml in this repository is an example"
        )
    return parsed


def problems(config: dict[str, Any]) -> list[str]:
    """Returns everything that Serve would refuse or ignore and that build_app would refuse, with locations; empty if
    nothing was found.

    Contradictions between parts are looked for only if each part is valid.
    """
    from ray.serve.schema import ServeDeploySchema  # the import takes seconds

    if malformed := [
        f"{place}.deployments[{number}]: must be a mapping"
        for place, application in our_applications(config)
        if isinstance(entries := application.get("deployments"), list)
        for number, entry in enumerate(entries)
        if not isinstance(entry, dict)
    ]:
        return malformed
    found = [f"{mistake} (Serve would ignore it)" for mistake in unknown_keys(config, ServeDeploySchema)]
    validated = None
    former = list(_former_policies(config))
    found += former
    try:
        validated = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        found += [f"{_place(item['loc'])}: {item['msg']}" for item in error.errors()]
    except (ImportError, AttributeError) as error:  # validation imports the policies
        found += [] if former else [f"a policy_function cannot be imported: {error}"]
    for place, application in our_applications(config):
        args = application.get("args") or {}
        mistakes = args_problems(args, f"{place}.args")
        found += mistakes
        if validated is not None and not mistakes:
            found += _contradictions(validated.http_options, application, AppConfig.model_validate(args), place)
    if not found and not any(our_applications(config)):
        found.append(f"applications: none has `import_path: {names.IMPORT_PATH}`")
    return found


def our_applications(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the applications that build_app makes, with their locations; the file may contain other applications."""
    for number, application in enumerate(config["applications"]):
        if isinstance(application, dict) and application.get("import_path") == names.IMPORT_PATH:
            yield f"applications[{number}]", application


def args_problems(args: object, place: str) -> list[str]:
    """Returns what AppConfig refuses, and contradictions that arise on a cluster with GPUs or on one without."""
    unknown = list(unknown_keys(args, AppConfig, place))
    if unknown:  # lists all unknown keys; pydantic stops at the first
        return unknown
    try:
        config = AppConfig.model_validate(args)
    except ValidationError as error:
        return list(_refusals(error, place))
    found: dict[str, None] = {}
    for has_gpu in (False, True):
        try:
            resolve(config, ClusterFacts(has_gpu=has_gpu))
        except ValueError as error:
            found[f"{place}: {error}"] = None
    return list(found)


def start_problems(config: dict[str, Any], num_cpus: int, num_gpus: int) -> list[str]:
    """Returns reasons why a Ray that starts on this machine, which has `num_cpus` and `num_gpus`, cannot run the
    applications."""
    from ray.serve.schema import HTTPOptionsSchema

    found = []
    http = HTTPOptionsSchema.model_validate(config.get("http_options") or {})
    if not _can_listen(http.host, http.port):
        found.append(f"http_options.port: another process listens on port {http.port}; end it, or set another port")
    for resource, asked, there in reservations(config, num_cpus, num_gpus):
        if asked > there:
            found.append(
                f"the replicas reserve {asked:g} {resource}, and this machine has {there}: some would wait for ever; "
                f"{FEWER[resource]}"
            )
    return found


def reservations(config: dict[str, Any], num_cpus: int, num_gpus: int) -> list[tuple[Resource, float, int]]:
    """Returns what Ray reserves for the replicas with which our applications start, beside what there is."""
    cpus = gpus = 0.0
    for _, application in our_applications(config):
        args = resolve(AppConfig.model_validate(application.get("args") or {}), ClusterFacts(has_gpu=num_gpus > 0))
        sections: dict[str, LLMConfig | IngressConfig | EncoderReplicaConfig] = {
            names.LLM: args.llm,
            names.INGRESS: args.ingress,
        }
        if args.encoder.implementation != "none":
            sections[names.ENCODER] = args.encoder_replica
        entries = {entry["name"]: entry for entry in application.get("deployments") or ()}
        for name, section in sections.items():
            entry = entries.get(name, {})
            replicas = _num_replicas_at_start(entry)
            cpus += replicas * section.num_cpus
            gpus += 0 if isinstance(section, IngressConfig) else replicas * float(section.num_gpus)  # resolved
    return [("CPUs", round(cpus, 4), num_cpus), ("GPUs", round(gpus, 4), num_gpus)]  # as Ray counts


def _num_replicas_at_start(deployment: dict[str, Any]) -> int:
    if scaled := deployment.get("autoscaling_config"):
        return int(scaled.get("initial_replicas") or scaled.get("min_replicas", 1))
    number = deployment.get("num_replicas")
    return number if isinstance(number, int) else 1  # "auto" starts with one


def _can_listen(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def all_problems(config: dict[str, Any]) -> list[str]:
    """Returns `problems`, or if there are none and vLLM is installed, its objections to its arguments."""
    return problems(config) or (vllm_problems(config) if compat.is_installed() else [])


def vllm_args(config: dict[str, Any]) -> list[tuple[str, AppConfig]]:
    """Returns location and settings of each of our applications that sets arguments of the engine or the server."""
    found = []
    for place, application in our_applications(config):
        args = AppConfig.model_validate(application.get("args") or {})
        if args.llm.engine_args or args.llm.server_args:
            found.append((f"{place}.args", args))
    return found


def vllm_problems(config: dict[str, Any]) -> list[str]:
    """Returns vLLM's objections to the engine's and the server's arguments, which takes seconds if there are any. vLLM
    must be installed."""
    found = []
    for place, args in vllm_args(config):
        own_tower = args.encoder.implementation == "none"
        try:
            compat.check_args(args.llm.engine_args, args.llm.server_args, own_tower=own_tower)
        except ValueError as error:
            found.append(f"{place}.{error}")
        if not own_tower and (reason := compat.engine_load_unsupported_reason(args.llm.engine_args)):
            found.append(f"{place}: {reason}")
    return found


def unknown_keys(value: object, model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yields the keys below `value` that are no fields of `model` or its sections, with the nearest known name."""
    schema = model.model_json_schema()
    yield from _unknown_keys(value, schema, schema.get("$defs", {}), place)


def _unknown_keys(value: object, node: dict[str, Any], sections: dict[str, Any], place: str) -> Iterator[str]:
    node = sections.get(node.get("$ref", "").rpartition("/")[2], node)
    for option in node.get("anyOf", ()):
        yield from _unknown_keys(value, option, sections, place)
    if isinstance(value, list) and "items" in node:
        for number, item in enumerate(value):
            yield from _unknown_keys(item, node["items"], sections, f"{place}[{number}]")
    known = node.get("properties")
    if isinstance(value, dict) and known:
        for key, item in value.items():
            if key in known:
                yield from _unknown_keys(item, known[key], sections, f"{place}.{key}".removeprefix("."))
            else:
                yield f"{place or 'top level'}: {unknown_key_message(str(key), list(known), item)}"


def _contradictions(http: HTTPOptionsSchema, application: dict[str, Any], args: AppConfig, place: str) -> Iterator[str]:
    """Yields what Serve accepts and the ingress refuses, and mistakes that would appear only when Serve deploys or
    scales."""
    ingress, limit_s = args.ingress, http.request_timeout_s
    if not 1 <= http.port <= 65535:
        yield f"http_options.port: {http.port} must be from 1 to 65535"
    prefix = str(application.get("route_prefix") or "/")
    if not prefix.startswith("/") or (prefix.endswith("/") and prefix != "/") or "{" in prefix or "}" in prefix:
        yield f"{place}.route_prefix: {prefix!r} must begin with /, not end with /, and have no braces"
    if refusal := bind_refusal(ingress.auth, http.host):
        yield f"{place}.args: {refusal}"
    if limit_s is not None and limit_s <= ingress.request_timeout_s:
        yield (
            f"http_options.request_timeout_s: {limit_s:g} is not over {place}.args.ingress.request_timeout_s, "
            f"{ingress.request_timeout_s:g}; Serve would end requests before the ingress answers"
        )
    function = (application.get("autoscaling_policy") or {}).get("policy_function")
    if not isinstance(function, str | None):
        yield f"{place}.autoscaling_policy.policy_function: Input should be a valid string"
    elif function in POLICY_OF:
        told = f"{function} is for the deployment {POLICY_OF[function]!r}, not the application"
        yield f"{place}.autoscaling_policy.policy_function: {told}"
    # Serve's queues shed by a count that leaves out images in flight.
    queues = {
        names.LLM: ("max_requests_waiting", ingress.max_requests_waiting),
        names.ENCODER: ("max_images_in_flight", ingress.max_images_in_flight),
    }
    seen: set[str] = set()
    for number, deployment in enumerate(application.get("deployments") or ()):
        name, here = deployment["name"], f"{place}.deployments[{number}]"
        if name in seen:
            yield f"{here}.name: {name!r} twice; Serve would merge the two entries"
        seen.add(name)
        if name not in names.DEPLOYMENTS:
            yield f"{here}.name: no deployment {name!r}; there are {', '.join(names.DEPLOYMENTS)}"
        if name == names.ENCODER and args.encoder.implementation == "none":
            yield f"{here}: remove this entry: with encoder.implementation: none there is no deployment {name!r}"
        key, bound = queues.get(name, ("", 0))
        queue = deployment.get("max_queued_requests", -1)
        if 0 <= queue < bound:
            yield (
                f"{here}.max_queued_requests: {queue} is less than args.ingress.{key}, {bound}; "
                "Serve would refuse what the ingress has let in"
            )
        if "ray_actor_options" in deployment:
            yield (
                f"{here}.ray_actor_options: Serve would replace all that the application sets, such as GPUs; set CPUs, "
                "GPUs and their type in args"
            )
        if deployment.get("user_config") is not None:
            yield f"{here}.user_config: no deployment takes it, and its replicas would not start; settings are in args"
        yield from _autoscaling_problems(deployment, f"{here}.autoscaling_config")


def _autoscaling_problems(deployment: dict[str, Any], place: str) -> Iterator[str]:
    """Yields what Serve refuses only when it deploys or scales. `place`: of the deployment's `autoscaling_config`."""
    from ray.serve.config import AutoscalingConfig

    scaled = dict(deployment.get("autoscaling_config") or {})
    policy = scaled.get("policy")
    if policy is None or isinstance(policy, dict):
        scaled.pop("policy", None)
        yield from _policy_problems(deployment["name"], policy or {}, f"{place}.policy")
    # `num_replicas: auto` has defaults of its own.
    defaults = AutoscalingConfig.default().model_dump() if deployment.get("num_replicas") == "auto" else {}
    try:
        AutoscalingConfig.model_validate(defaults | scaled)
    except ValidationError as error:
        yield from _refusals(error, place)


def _former_policies(value: object, place: str = "") -> Iterator[str]:
    """Yields former names of our scaling policies, at any location."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _former_policies(item, f"{place}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _former_policies(item, f"{place}[{number}]")
    elif place.endswith("policy_function") and (renamed := describe_former_key(str(value))):
        yield f"{place}: {renamed}"


def _policy_problems(deployment: str, policy: dict[str, Any], place: str) -> Iterator[str]:
    from deployments.scaling import policies

    function = policy.get("policy_function")
    if not isinstance(function, str | None):
        yield f"{place}.policy_function: Input should be a valid string"
        return
    if function not in POLICY_OF:
        return
    if deployment != POLICY_OF[function]:
        yield f"{place}.policy_function: {function} is for the deployment {POLICY_OF[function]!r} alone"
    arguments = policy.get("policy_kwargs") or {}
    if not isinstance(arguments, dict):
        yield f"{place}.policy_kwargs: Input should be a valid dictionary"
        return
    if renamed := "; ".join(filter(None, map(describe_former_key, arguments))):
        yield f"{place}.policy_kwargs: {renamed}"
        return
    try:
        getattr(policies, function.partition(":")[2])(**arguments)
    except (TypeError, ValueError) as error:
        yield f"{place}.policy_kwargs: {error}"


def _refusals(error: ValidationError, place: str) -> Iterator[str]:
    """Yields pydantic's messages about the value at `place`, with their locations."""
    for item in error.errors():
        yield f"{_place((place, *item['loc']))}: {item['msg'].removeprefix('Value error, ')}"


def _place(location: tuple[int | str, ...]) -> str:
    """Formats a location: ("applications", 0, "args") as `applications[0].args`."""
    written = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return written.removeprefix(".") or "top level"
