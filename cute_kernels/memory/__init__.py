"""Memory layouts and addresses: experts' weights, rows of a group, and scales."""
