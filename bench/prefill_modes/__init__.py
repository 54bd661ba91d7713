"""Prefill with and without two-microbatch overlap: tokens/s by prompt length and SM control.

Each row is one way to run the same prompts, on two ranks that step together, in processes of its
own with a time limit; rows that are done are not run again. A row ends with each prompt's first
token, which is compared with that of the row without microbatches.

    python -m bench.prefill_modes --out prefill_modes.json --models qwen3_30b_24l
"""
