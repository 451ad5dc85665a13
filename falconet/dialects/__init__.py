"""The originals' command lines, as tables: an old line becomes a canonical one; never imports torch."""
