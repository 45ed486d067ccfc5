"""Names shared by the application file, `build_app` and the tools that read the file."""

from __future__ import annotations

IMPORT_PATH = "deployments.app:build_app"
INGRESS, ENCODER, LLM = DEPLOYMENTS = ("Ingress", "Encoder", "LLM")
RESPONSE_STORE = "ResponseStore"
"""Started beside them with one replica, which is not configured."""
