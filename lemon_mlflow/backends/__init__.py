"""The two trainers behind one interface. Only `hf` and `mlx` import a framework, and only inside a child process."""
