"""The programs: router, prefill worker, decode worker, command line."""
