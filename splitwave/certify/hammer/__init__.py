"""The ragged hammer's own logic: what it walks through, and what its outcome means."""
