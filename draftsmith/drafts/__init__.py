"""A draft as a thing: the networks that training and decoding share, and how one is loaded and
checked.
"""
