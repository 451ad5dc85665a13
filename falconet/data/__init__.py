"""Images: from where they are stored to batches on the device."""
