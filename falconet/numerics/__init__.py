"""Number formats: which tensor has which type."""
