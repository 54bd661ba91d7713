"""What workers of either role share: their group's start, certificate, guard and description."""
