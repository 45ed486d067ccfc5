"""Autoscaling policies of Ray Serve; the application file names them as `deployments.scaling:VisualTokenPolicy`."""

from deployments.scaling.policies import EngineLoadPolicy, VisualTokenPolicy

__all__ = ["EngineLoadPolicy", "VisualTokenPolicy"]
