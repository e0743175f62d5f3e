"""Recurrent states: where prompts are cut to keep them, and who can find them."""
