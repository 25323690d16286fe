"""Running exported files, and running the artifact itself as integers in PyTorch."""
