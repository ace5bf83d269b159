"""Load over asyncio: schedules, prompts, both protocols' clients, and a record of every request. Imports no Locust."""
