"""Reading what somebody else has written, within limits."""
