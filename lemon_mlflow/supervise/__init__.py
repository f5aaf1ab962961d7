"""Work in a child process: started clean, watched, stopped when it must be, and its end told truthfully."""
