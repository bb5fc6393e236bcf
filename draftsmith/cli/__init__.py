"""The command line. Options are read before a command's code is imported: typos fail at once."""
