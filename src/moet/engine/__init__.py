"""Engines that host moet's experts. Only this room imports them."""
