"""Load under Locust: users, shapes, options, and the conductor that keeps account of every request in every process."""
