"""`draftsmith align`: from a target and prompts to an aligned draft and what it bought, in one
command.
"""
