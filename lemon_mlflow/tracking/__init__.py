"""What is told to MLflow, by the parent process alone, and what a person reads of it."""
