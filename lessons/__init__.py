"""The lecture to walk through: ten lessons that run the product's own modules with small numbers.

Above everything else: a lesson may use the model, the exporter, the server's sampling and the client. Nothing imports
this package; `python -m model lesson` and `onward lesson` start it by name.
"""
