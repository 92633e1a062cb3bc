__version__ = "0.68.0"
