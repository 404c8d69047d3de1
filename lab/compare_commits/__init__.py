"""Compare two commits: bits, messages and host operations of small runs."""
