"""Whole decode steps as CUDA graphs over DeepEP's high-throughput all-to-all.

A dispatch that asks the host how many rows it received cannot be captured. Worst-token dispatch
takes room for the most rows that may come, so no host is asked: the shapes are the graph's, and
rows past the received ones carry no expert. Two transports do it:

- `v2`: DeepEP's ElasticBuffer without CPU synchronisation (vLLM's backend deepep_v2);
- `legacy`: DeepEP's Buffer with `num_worst_tokens`, within one host (deepep_high_throughput).

Either is a buffer that vLLM's own prepare and finalize are handed in place of DeepEP's
(`elastic`, `legacy`); `install` puts it there, `gate` refuses configurations in which a step could
leave its graphs, `collectives` numbers what was launched and what has ended, and `wedge` ends a
rank that waits too long and says where it stands.
"""
