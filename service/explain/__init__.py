"""`Explain`: attention weights, and the page and picture that show them."""
