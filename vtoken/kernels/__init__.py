"""Functions over K/V data: a plain torch reference for each, and a fast version of the same function."""
