"""What torch has compiled in a worker of vLLM's engine, where vLLM imports `Compiles` by its name."""

from __future__ import annotations


class Compiles:
    """vLLM's `worker_extension_cls`: its methods are the worker's."""

    def num_compiled(self) -> int:
        """Functions, or parts of them, since the worker's start; also those whose code was in a cache on disk."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the vision tower's weights in memory, and of the whole model's."""
        model = self.get_model()  # type: ignore[attr-defined]  # vLLM's worker has it
        tower = sum(each.nbytes for each in model.visual.parameters() if not each.is_meta)
        return tower, sum(each.nbytes for each in model.parameters() if not each.is_meta)
