"""What may be drawn, and what of the drawn tokens counts: masks of grammars, and checks."""
