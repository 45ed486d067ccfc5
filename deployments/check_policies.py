"""What is wrong with our scaling policies in a serve_config.yaml; for `check_config.py`.

It must not know of anything else in the file.
"""

from __future__ import annotations

from collections.abc import Iterator

VISUAL_WORK = "deployments.scaling:VisualWork"
ENGINE_WORK = "deployments.scaling:EngineWork"
PROPORTION = "deployments.scaling:Proportion"
POLICY_OF = {VISUAL_WORK: "Encoder", ENGINE_WORK: "LLM"}
"""The deployment that each is for."""


def of_deployment(deployment: object, place: str) -> Iterator[str]:
    """What our scaling policies would refuse, which Serve would find out only when they are to scale."""
    if not isinstance(deployment, dict):
        return
    scaling = deployment.get("autoscaling_config")
    policy = scaling.get("policy") if isinstance(scaling, dict) else None
    if not isinstance(policy, dict) or (function := policy.get("policy_function")) not in (*POLICY_OF, PROPORTION):
        return
    if function == PROPORTION:
        yield f"{place}.policy_function: {PROPORTION} is for the application; it stands below `autoscaling_policy`"
        return
    if deployment.get("name") != POLICY_OF[function]:
        yield f"{place}.policy_function: {function} is for the deployment {POLICY_OF[function]!r} alone"
    yield from _refused_arguments(function, policy, place)


def of_application(application: dict[str, object], place: str) -> Iterator[str]:
    """Likewise, of the policy that stands beside the application's deployments."""
    policy = application.get("autoscaling_policy")
    if not isinstance(policy, dict) or (function := policy.get("policy_function")) not in (*POLICY_OF, PROPORTION):
        return
    place = f"{place}.autoscaling_policy"
    if function != PROPORTION:
        yield f"{place}.policy_function: {function} is for the deployment {POLICY_OF[function]!r}, not the application"
        return
    yield from _refused_arguments(function, policy, place)
    deployments = application.get("deployments")
    named = [each for each in deployments if isinstance(each, dict)] if isinstance(deployments, list) else []
    scaling = {each.get("name") for each in named if isinstance(each.get("autoscaling_config"), dict)}
    for name in ("Encoder", "LLM"):
        if name not in scaling:
            yield f"{place}: {PROPORTION} scales neither without an `autoscaling_config` of the deployment {name!r}"


def _refused_arguments(function: str, policy: dict[str, object], place: str) -> Iterator[str]:
    from deployments import scaling

    arguments = policy.get("policy_kwargs")
    try:
        getattr(scaling, function.partition(":")[2])(**(arguments if isinstance(arguments, dict) else {}))
    except (TypeError, ValueError) as error:
        yield f"{place}.policy_kwargs: {error}"
