"""The ground every other package stands on: sampling, records, files, models, text, and the door."""

__version__ = "0.1.0"
