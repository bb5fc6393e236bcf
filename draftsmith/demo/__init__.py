"""The demo: text that every Python carries, the nano pair that ships with the project, and its
recipes.
"""
