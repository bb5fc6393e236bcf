"""`draftsmith doctor --served`: does a running server accept what was predicted, and why not?"""
