"""The command line: one module per command, which parses, calls what Python can call too, and prints.

What a command calls is imported after its options are read: torch and transformers take seconds to import, and a
mistyped option need not wait for them.
"""
