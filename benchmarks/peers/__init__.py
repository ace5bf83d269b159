"""What a user would run instead: one small program per peer, all speaking the protocol of `benchmarks.peers.protocol`.

Each runs alone, from the root of the repository, in an environment of its own that need not know this project:

    build/bench/venvs/transformers/bin/python -m benchmarks.peers.transformers --folder HF_FOLDER --work DIR

Nothing in here imports anything of ours but the protocol; `benchmarks.peers.systems` says how each is installed.
"""
