"""HTTP limits in front of the ingress: HAProxy, and limits on Ray Serve's own proxy."""
