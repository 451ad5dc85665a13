"""What the user asked for, checked; never imports torch."""
