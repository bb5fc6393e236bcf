"""The ground all other packages stand on: errors, options, files, processes, sampling, tokenizers,
models, prompts.
"""

__version__ = "0.2.0"
