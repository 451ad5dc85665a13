"""State on disk: whole or refused."""
