"""What is checked after training, each in a process of its own."""
