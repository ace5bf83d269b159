"""What measurements share: the command line, rounds, journal, statistics, tables, pictures."""
