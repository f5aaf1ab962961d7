"""Rows in, clean tokenised rows out. `read` needs no model, `tokens` needs a tokenizer, neither needs a backend."""
