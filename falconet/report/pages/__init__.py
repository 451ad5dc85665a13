"""Pages to look at in a browser: of one run, of several under way, and of a folder of photos."""
