"""An encoder's process that lends embeddings by NIXL. A line on stdin asks for one, or how many are lent; stdout tells.

A program, since a test stops it and kills it.
"""

from __future__ import annotations

import base64
import json
import sys

from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import encoded


def main() -> None:
    """A line in is `{"number": 1, "tokens": 6}`, or `{}` for the number of those that are lent."""
    store = EmbeddingStore(2**28)
    sender = RemoteSender(store, RdmaProcess())
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            print(json.dumps({"lent": len(sender._leases)}), flush=True)
            continue
        remote = sender.publish(encoded(store, asked["number"], tokens=asked["tokens"]))
        assert remote is not None
        told = {
            "agent_metadata": base64.b64encode(remote.agent_metadata).decode(),
            "address": remote.address,
            "lease": base64.b64encode(remote.lease).decode(),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
