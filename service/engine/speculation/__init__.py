"""Draft tokens: what a sequence may say next, for the model to confirm."""
