"""An encoder's process that lends embeddings by NIXL. A line on stdin asks for one, or how many are lent; stdout tells.

A program, since a test stops it and kills it.
"""

from __future__ import annotations

import base64
import json
import sys

from deployments.embedding_shelf import EmbeddingShelf
from deployments.nixl_memory import NixlMemory
from deployments.remote_lending import RemoteLender
from tests.unit.deployments.test_lending import encoded


def main() -> None:
    """A line in is `{"number": 1, "tokens": 6}`, or `{}` for the number of those that are lent."""
    shelf = EmbeddingShelf(2**28)
    lender = RemoteLender(shelf, NixlMemory())
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            print(json.dumps({"lent": len(lender)}), flush=True)
            continue
        image = lender.lend(encoded(shelf, asked["number"], tokens=asked["tokens"]))
        assert image is not None
        assert image.remote is not None
        told = {
            "introduction": base64.b64encode(image.remote.introduction).decode(),
            "address": image.remote.address,
            "lease": base64.b64encode(image.remote.lease).decode(),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
