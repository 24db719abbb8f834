"""The weights of blocks on a device, and the tables of the rotary embedding."""
