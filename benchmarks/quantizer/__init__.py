"""How near the quantizer comes to the speed of memory."""
