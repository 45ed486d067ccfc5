"""Finds what is wrong in a serve_config.yaml before anything is started: `vitray check-config`.

Serve ignores keys that it does not know, so a misspelt one changes nothing and nobody hears of it; here each is named
with its place. Our own `args` are held to configs/schema.py. It must not start or connect to anything.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, JsonValue, ValidationError

from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig, section_fields, unknown_key
from deployments import check_policies, vllm_compat
from deployments.listening import refused_to_strangers

IMPORT_PATH = "deployments.app:build_app"
DEPLOYMENTS = ("Ingress", "Encoder", "LLM")  # as deployments/app.py names them; tests/unit/test_cli.py compares
SERVES_OWN_HOST = "0.0.0.0"  # where the file says nothing


class ConfigFileError(Exception):
    """The file cannot be read as a configuration at all."""


def read_config(path: Path) -> dict[str, object]:
    """The parsed file. Raises ConfigFileError with a sentence that says what to do."""
    try:
        parsed = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("applications"), list):
        raise ConfigFileError(
            f"{path}: needs a list `applications:`; serve_config.yaml in this repository is an example"
        )
    return parsed


def problems(config: dict[str, object]) -> list[str]:
    """What Serve would refuse or ignore and what build_app would refuse, each with its place. Empty: nothing found."""
    from ray.serve.schema import ServeDeploySchema  # seconds: not before it is needed

    found = list(unknown_keys(config, ServeDeploySchema))
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        found += [
            f"{_place(item['loc'])}: {item['msg']}" for item in error.errors() if item["type"] != "extra_forbidden"
        ]
    for place, application in our_applications(config):
        found += _deployment_problems(application, place)
        found += _queue_problems(application, place)
        found += check_policies.of_application(application, place)
        found += args_problems(application.get("args") or {}, f"{place}.args")
        found += _door_problems(config, application.get("args") or {}, f"{place}.args")
    if not found and not any(our_applications(config)):
        found.append(f"applications: none has `import_path: {IMPORT_PATH}`")
    return found


def our_applications(config: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Those that build_app makes, with their places; an application of somebody else may stand beside them."""
    applications = config["applications"]
    assert isinstance(applications, list)
    for number, application in enumerate(applications):
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            yield f"applications[{number}]", application


def args_problems(args: object, place: str) -> list[str]:
    """What AppConfig refuses, and what does not go together whether or not the cluster has GPUs."""
    unknown = list(unknown_keys(args, AppConfig, place))
    if unknown:  # all of them, where pydantic stops at the first
        return unknown
    try:
        config = AppConfig.model_validate(args)
    except ValidationError as error:
        return [
            f"{_place((place, *item['loc']))}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()
        ]
    found: dict[str, None] = {}
    for has_gpu in (False, True):
        try:
            resolve(config, ClusterFacts(has_gpu=has_gpu))
        except ValueError as error:
            found[f"{place}: {error}"] = None
    return list(found)


def vllm_args(config: dict[str, object]) -> list[tuple[str, dict[str, JsonValue], dict[str, JsonValue]]]:
    """Place, engine_args and server_args of every application of ours that sets any."""
    found = []
    for place, application in our_applications(config):
        llm = AppConfig.model_validate(application.get("args") or {}).llm
        if llm.engine_args or llm.server_args:
            found.append((f"{place}.args", llm.engine_args, llm.server_args))
    return found


def vllm_problems(config: dict[str, object]) -> list[str]:
    """What vLLM does not know in the engine's and the server's arguments. Takes seconds; vLLM must be installed."""
    found = []
    for place, engine_args, server_args in vllm_args(config):
        try:
            vllm_compat.check_args(engine_args, server_args)
        except ValueError as error:
            found.append(f"{place}.{error}")
    return found


def unknown_keys(value: object, annotation: object, place: str = "") -> Iterator[str]:
    """Keys that no field of the section in `annotation` has, with the nearest known name."""
    if isinstance(value, list):
        for item_annotation in _arguments(annotation, list):
            for number, item in enumerate(value):
                yield from unknown_keys(item, item_annotation, f"{place}[{number}]")
    sections = list(_sections(annotation))
    if not isinstance(value, dict) or len(sections) != 1:
        return
    (section,) = sections
    fields = section_fields(section) or {}
    known = fields | _aliases(section)
    for key, item in value.items():
        if key in known:
            yield from unknown_keys(item, known[key], f"{place}.{key}".removeprefix("."))
        else:
            ignored = "" if _refuses_unknown(section) else " (Serve would ignore it)"
            yield f"{place or 'top level'}: {unknown_key(str(key), list(fields))}{ignored}"


def _aliases(section: type) -> dict[str, object]:
    """Other names of a pydantic model's fields, with the fields' types."""
    if not issubclass(section, BaseModel):
        return {}
    return {field.alias: field.annotation for field in section.model_fields.values() if field.alias}


def _refuses_unknown(section: type) -> bool:
    return not issubclass(section, BaseModel) or section.model_config.get("extra") == "forbid"


def _alternatives(annotation: object) -> Iterator[object]:
    """The members of a union, else the annotation itself."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _sections(annotation: object) -> Iterator[type]:
    for member in _alternatives(annotation):
        if isinstance(member, type) and section_fields(member) is not None:
            yield member


def _arguments(annotation: object, container: type) -> Iterator[object]:
    for member in _alternatives(annotation):
        if typing.get_origin(member) is container:
            yield from typing.get_args(member)


def _door_problems(config: dict[str, object], args: object, place: str) -> Iterator[str]:
    """A server that strangers reach and that has no keys, which its ingress would refuse to be."""
    options = config.get("http_options")
    host = options.get("host", SERVES_OWN_HOST) if isinstance(options, dict) else SERVES_OWN_HOST
    try:
        door = AppConfig.model_validate(args).ingress.door
    except ValidationError:
        return  # told already
    if refusal := refused_to_strangers(door, str(host)):
        yield f"{place}: {refusal}"


def _deployment_problems(application: dict[str, object], place: str) -> Iterator[str]:
    deployments = application.get("deployments")
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        name = deployment.get("name") if isinstance(deployment, dict) else None
        if isinstance(name, str) and name not in DEPLOYMENTS:
            yield f"{place}.deployments[{number}].name: no deployment {name!r}; there are {', '.join(DEPLOYMENTS)}"
        yield from check_policies.of_deployment(deployment, f"{place}.deployments[{number}].autoscaling_config.policy")


def _queue_problems(application: dict[str, object], place: str) -> Iterator[str]:
    """Queues of Serve that would refuse before the ingress does, by a count that leaves out images under way."""
    try:
        ingress = AppConfig.model_validate(application.get("args") or {}).ingress
    except ValidationError:
        return  # told already
    bounds = {
        "LLM": ("max_requests_waiting", ingress.max_requests_waiting),
        "Encoder": ("max_images_in_flight", ingress.max_images_in_flight),
    }
    deployments = application.get("deployments")
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        if not isinstance(deployment, dict) or deployment.get("name") not in bounds:
            continue
        key, bound = bounds[str(deployment["name"])]
        queue = deployment.get("max_queued_requests", -1)
        if isinstance(queue, int) and 0 <= queue < bound:
            yield (
                f"{place}.deployments[{number}].max_queued_requests: {queue} is less than args.ingress.{key}, {bound}; "
                "Serve would refuse what the ingress has let in"
            )


def _place(location: tuple[int | str, ...]) -> str:
    """("applications", 0, "args") as `applications[0].args`."""
    written = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return written.removeprefix(".") or "top level"
