"""The order of waiting and running requests: priorities, tenants, preemption, deadlines."""
