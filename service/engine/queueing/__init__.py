"""From a request to its turn: intake, waiting, tenants, preemption, deadlines."""
