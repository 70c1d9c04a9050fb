"""How inference and training engines wrap the buffer, each in the shape of its own interfaces."""
