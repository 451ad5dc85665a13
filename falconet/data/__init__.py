"""Images, from where they lie to a batch on the device."""
