"""The data path of robot learning: memory stays bounded, training never stalls, nothing is lost."""

__version__ = "0.1.0"
