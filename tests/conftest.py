"""What every test needs: the import hook for media packages that do not match a CPU-only torch."""

from __future__ import annotations

from deployments import import_shim

import_shim.activate()
