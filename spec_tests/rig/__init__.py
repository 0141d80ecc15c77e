"""The rig: live ranks, what they did, what is right, how to say that they differ."""
