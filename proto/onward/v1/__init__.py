"""Version 1: `package onward.v1`."""
