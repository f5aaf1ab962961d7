"""The training loop that both backends share: one meaning of step, loss, seed, validation and resume."""
