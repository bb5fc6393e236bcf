"""The command line: one module per command, which parses, calls what Python can call too, and prints."""
