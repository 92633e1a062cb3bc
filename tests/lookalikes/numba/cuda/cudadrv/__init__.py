from . import driver
