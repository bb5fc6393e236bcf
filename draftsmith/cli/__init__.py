"""The thin edge: one module a command. Parse, call, print."""
