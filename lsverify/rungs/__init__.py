"""The rungs of the evidence ladder above `objective`, one file each: what is equal to what, and how it is shown."""
