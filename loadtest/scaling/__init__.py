"""The scaling study: measures what a length costs, fits it and judges the claim that attention is quadratic.

`command` runs it: `study` asks servers through `probe`, `judge` examines the samples against `claims` with `fit`,
`report` writes the result with the drawings of `pictures`.
"""
