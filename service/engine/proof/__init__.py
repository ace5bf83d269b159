"""Runs outside the schedule: golden cases replayed, chunks compared bit by bit, step times measured."""
