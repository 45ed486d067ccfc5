"""Items in vLLM, for encoder and LLM replicas: headers, references to items in requests, towers without weights.

`references.py` imports no vLLM; the other modules do, after `import_shim.activate()`.
"""
