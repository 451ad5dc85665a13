"""How well a model does: its loss, its accuracy on every image once, and where it is right and wrong."""
