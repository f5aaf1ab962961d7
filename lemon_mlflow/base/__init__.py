"""Which base model a run stands on, exactly: its folder, its hashes, its quantization, its licence as declared."""
