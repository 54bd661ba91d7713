"""Expert parallelism on the CPU build of vLLM, and engines that start fast on a laptop."""
