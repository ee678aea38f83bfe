__version__ = "0.1.0"  # that of wsync: a trainer and its readers are of one version
