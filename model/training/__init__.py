"""How a model learns: the loop, what it needs to go on after a break, what people see of it."""
