"""Steps that no request asked for: golden cases replayed, chunks compared bit by bit, step times measured."""
