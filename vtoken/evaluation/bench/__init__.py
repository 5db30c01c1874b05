"""The evaluation: one experiment per file, behind ``vtoken bench``."""
