"""The operator's settings (`schema`), and the resolution of "auto" on a cluster (`resolve`)."""
