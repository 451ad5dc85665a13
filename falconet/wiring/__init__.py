"""Options in, parts out: what the commands are made of, from the data to a whole run."""
