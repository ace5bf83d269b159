"""The graphs over slots: K/V in contiguous rows, one for each running sequence."""
