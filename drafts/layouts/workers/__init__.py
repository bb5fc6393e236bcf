"""Scripts that run in other engines' environments. They import nothing of this project."""
