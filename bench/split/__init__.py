"""A split beside the same GPUs unsplit: the comparison that needs four of them.

    python -m bench.split split_h200 --model MODEL_DIR --out bench/results/split-h200.json
    python -m bench.split split_sim --engine sim --out bench/results/split-sim.json
    python -m bench.split split_h200 --model MODEL_DIR --check

The systems: prefill and decode groups of two behind a router; one group of four that serves both
phases; two such groups of two. A cell is one system, one shape (tokens in and out) and one load:
Poisson arrivals at a rate, or a number of streams that each ask again when answered. Every system
gets the same arrivals and prompts. Cells are kept one by one, so a run may be cut off and gone on
with. Simulated engines test the comparison; their figures are a timing model's, so their file's
name must say `sim`, and nothing is claimed from them.

`settings` reads the workload's file, `trace` says what is asked and when, `client` asks,
`balance` chooses among addresses, `programs` are a system's processes, `sim_server` simulates a
group that serves both phases, `devices` counts GPUs, `measure` runs one cell, `host` one system,
`figures` makes numbers of what clients saw, `cells` says what to run and keeps results, `page`
tells, `weights` writes a model of random weights.
"""
