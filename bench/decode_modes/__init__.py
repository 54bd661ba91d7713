"""Decode modes beside each other: whole decode steps of vLLM engines that never prefill.

    python -m bench.decode_modes --out RESULTS.json [--modes A,B] [--models X,Y] [--budget-s 500]

A row is one mode on one model: two ranks with experts apart, in a process tree of its own with a
time limit. In one boot it decodes full batches of several sizes, a ragged batch, and a random walk
of the number of running sequences on each rank; greedy tokens are compared with those of the
model's first row, which is eager. Rows are added to the results one by one, so a run may be cut
off and gone on with.

`models` has the shapes and the least bytes that a step must read, `modes` what an engine is given,
`traffic` what is decoded, `rank` is one rank's process, `tree` starts and ends processes, `rows`
says what to run next and keeps results, `tokens` compares, `plots` and `page` draw and tell.
"""
