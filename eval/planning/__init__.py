"""Find the tree with which a draft is fastest on this machine."""
