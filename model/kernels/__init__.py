from pathlib import Path


def library():
    p = Path("/tmp/w/s8/libonward.so")
    return p
