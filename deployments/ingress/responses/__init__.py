"""Stored responses: the store, a deployment of its own, and the ingress's client of it."""
