"""The command line. What a command calls is imported after its options are read, so that a typo
answers at once.
"""
