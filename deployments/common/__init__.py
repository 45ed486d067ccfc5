"""Messages between deployments, errors, throughput estimates, the fair queue, child processes."""
