"""All code that imports vLLM or runs in its processes, for LLM and encoder replicas.

Functions of `compat.py` import vLLM when they are called; `connector` is imported by vLLM itself.
"""
