"""What a run was made of: hashes of files, the environment, licences as declared."""
