"""What `splitwave certify` does to an engine that serves nobody: look at each step, choose the size
of steps, and break things on purpose, while it runs.

Nothing here acts unless the environment says SPLITWAVE_PROBE=1; then each part is put on the
objects of one engine when it is asked for, and taken off again. A break is how a check's positive
control is made: the same engine, with one thing wrong.
"""
