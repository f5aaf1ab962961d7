"""One file a verb: what the `lemon` command and the MLproject entry points do."""
